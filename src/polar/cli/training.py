"""Commands that train and evaluate: options and help. What they do is in the module of their name, imported when it is called."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to `polar`."""
    app.command()(train)
    app.command()(sft)
    app.command("eval")(evaluate)
    app.command()(plot)
    app.command()(laptop)


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="What to train, on which tasks, and how.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/<name of CONFIG>")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Batches to train on.", show_default="what CONFIG says")] = None,
) -> None:
    """Train a policy by GRPO, on sessions of real harnesses.

    All is written as it happens: the same command, given again, goes on where the run stopped, and with more --steps further.

    Example: `polar train examples/smollm2.toml`, then `polar plot runs/smollm2`
    """
    from polar.cli.train import train_command

    raise typer.Exit(train_command(config, out=out, steps=steps))


def sft(
    data: Annotated[list[Path], typer.Argument(metavar="CHATS.jsonl", help="Chats, as `polar export --format sft` writes them.")],
    out: Annotated[Path, typer.Option(help="Folder for metrics and the trained model.")],
    model: Annotated[str, typer.Option(metavar="DIR|laptop|smollm2", help="Where training begins.")] = "smollm2",
    held_out: Annotated[
        Path | None,
        typer.Option(metavar="CHATS.jsonl", help="Chats to measure the loss on, before and after.", show_default=False),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the chats.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Chats a step.")] = 32,
    lr: Annotated[float, typer.Option(help="Learning rate at its highest.")] = 1e-5,
    lora_rank: Annotated[int, typer.Option(min=0, help="0 trains all weights.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one forward pass.")] = 16_384,
    seed: Annotated[int, typer.Option(help="Of the order of chats.")] = 0,
) -> None:
    """Fine-tune a model on chats: what assistants said is learned, all else is context.

    Example: `polar export runs/demo --format sft`, then `polar sft runs/demo/sft.jsonl --out runs/sft`
    """
    from polar.cli.sft import sft_command

    sft_command(
        data,
        model=model,
        out=out,
        held_out=held_out,
        epochs=epochs,
        batch=batch,
        lr=lr,
        lora_rank=lora_rank,
        max_tokens=max_tokens,
        seed=seed,
    )


def evaluate(
    tasks: Annotated[list[str], typer.Argument(metavar="TASKS", help="As `polar run` takes them; held-out ones, mostly.")],
    harness: Annotated[list[str], typer.Option("--harness", help="Run every task with this harness; repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder of the evaluation; a run for each harness.")],
    model: Annotated[str, typer.Option(metavar="DIR|laptop|smollm2", help="As in `polar run`.")] = "",
    engine: Annotated[str, typer.Option(metavar="URL|embedded", help="As in `polar run`.")] = "embedded",
    samples: Annotated[int | None, typer.Option(min=1, help="Sessions per task.", show_default="what each task says")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Harnesses that run at the same time.")] = 8,
    sandbox: Annotated[Literal["auto", "process", "bubblewrap"], typer.Option(help="Where sessions live.")] = "auto",
    against: Annotated[
        Path | None, typer.Option(help="An earlier evaluation of the same tasks, to compare with.", show_default=False)
    ] = None,
) -> None:
    """Say how much of some tasks a policy solves, with 95 % intervals that take tasks, not sessions, for independent.

    Sessions that infrastructure failed count neither way, and are shown. The same command goes on, and retries them.

    Example: `polar eval demo --harness pi --model smollm2 --out runs/before`
    """
    from polar.cli.eval import eval_command
    from polar.cli.serving import serving

    raise typer.Exit(
        eval_command(
            tasks,
            harnesses=harness,
            samples=samples,
            serving=serving(engine, model, "auto", [], False),
            concurrency=concurrency,
            sandbox=sandbox,
            out=out,
            against=against,
        )
    )


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of training runs, a line each.")],
    metric: Annotated[
        list[str] | None, typer.Option("--metric", help="What to draw; repeatable.", show_default="the main ones")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Picture to write (.png, .svg, .pdf).", show_default="RUN/curves.png")] = None,
) -> None:
    """Draw the curves of training runs.

    Example: `polar plot runs/demo`
    """
    from polar.cli.plot import plot_command

    plot_command(runs, metrics=metric or [], out=out)


def laptop(
    out: Annotated[Path, typer.Argument(help="Directory for the model.")],
    model: Annotated[str, typer.Option(metavar="DIR", help="Begin with this model and its tokenizer, not with nothing.")] = "",
) -> None:
    """Make the laptop policy anew: a scripted expert drives five real harnesses, and a small model learns from what it did.

    Training stops when the model is good enough to begin reinforcement learning, and no sooner or later.

    Example: `polar laptop runs/laptop`, then `polar run workspace:held_out:20 --harness pi --model runs/laptop`
    """
    from polar.cli.laptop import laptop_command

    raise typer.Exit(laptop_command(out, model=model))
