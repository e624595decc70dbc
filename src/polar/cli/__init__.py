"""The command line: names, options and help. What a command does is in the module of its name, imported when it is called.

So `polar --help` is quick and needs neither torch nor an engine. Exit status: 0 fine; 1 the run or the audit found something
wrong, or infrastructure failed; 2 wrong usage; 130 Ctrl-C.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from polar.cli import training
from polar.cli.errors import PolarGroup

app = typer.Typer(
    cls=PolarGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train language agents by reinforcement learning, through harnesses that nobody had to change.\n\n"
    "Example: `polar run demo`, then `polar show runs/demo`.",
)
engine_app = typer.Typer(
    no_args_is_help=True, help="Serve a model, or check who does.\n\nExample: `polar engine serve smollm2 --port 8000`"
)
harness_app = typer.Typer(no_args_is_help=True, help="The agent programs that Polar runs.\n\nExample: `polar harness install pi`")
app.add_typer(engine_app, name="engine")
app.add_typer(harness_app, name="harness")

Builder = Annotated[Literal["prefix_merging", "per_request"], typer.Option(help="How calls become traces.")]
Treatment = Literal["train", "exclude"]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
CapturedArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or of `polar gateway`.")]
EngineOption = Annotated[
    str,
    typer.Option(
        metavar="URL|embedded",
        help="Polar's own, or a server: vLLM, SGLang and llama.cpp are told apart by themselves, or by vllm+URL, sglang+URL, "
        "llama_cpp+URL; openai+URL#MODEL is any provider, text only. URL,URL are replicas of one model. "
        "Its key is $POLAR_ENGINE_KEY.",
    ),
]
ModelOption = Annotated[
    str,
    typer.Option(
        metavar="DIR|laptop|smollm2",
        help="Model of the embedded engine (default smollm2; laptop is Polar's own); for a URL the directory of "
        "the model's tokenizer, if it is not where the engine says.",
        show_default=False,
    ),
]


RendererOption = Annotated[
    str,
    typer.Option(
        metavar="auto|none|NAME",
        help="Who turns messages into tokens. auto takes the renderer of the model's family; where there is none, or with "
        "none, the engine renders, and histories that drift fork.",
    ),
]
RouteOption = Annotated[
    list[str] | None,
    typer.Option(
        "--route",
        metavar="NAME=URL",
        help="Calls that ask for model NAME are answered by another engine, and never trained; repeatable. "
        "Its key is $POLAR_ROUTE_KEY_NAME.",
        show_default=False,
    ),
]
UnprovenOption = Annotated[
    bool,
    typer.Option("--accept-unproven", help="Serve an engine that cannot prove all that training relies on."),
]


def _version(wanted: bool) -> None:
    if wanted:
        from polar.version import __version__

        typer.echo(f"polar {__version__}")
        raise typer.Exit


@app.callback()
def polar(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    tasks: Annotated[list[str], typer.Argument(metavar="TASKS", help="YAML or JSONL files, directories of them, or `demo`.")],
    harness: Annotated[str | None, typer.Option(help="Run every task with this harness.", show_default=False)] = None,
    engine: EngineOption = "embedded",
    model: ModelOption = "",
    renderer: RendererOption = "auto",
    route: RouteOption = None,
    accept_unproven: UnprovenOption = False,
    samples: Annotated[int | None, typer.Option(min=1, help="Sessions per task.", show_default="what each task says")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Harnesses that run at the same time.")] = 8,
    sandbox: Annotated[Literal["auto", "process", "bubblewrap"], typer.Option(help="Where sessions live.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/<first source>")] = None,
    require_spread: Annotated[bool, typer.Option("--require-spread", help="Fail unless rewards vary within some task.")] = False,
) -> None:
    """Run tasks through a harness, record every token, score every session.

    All is written as it happens: the same command, given again, goes on where the run stopped and retries what failed.

    Example: `polar run demo --samples 4`
    """
    from polar.cli.run import run_command
    from polar.cli.serving import serving

    raise typer.Exit(
        run_command(
            tasks,
            harness=harness,
            samples=samples,
            serving=serving(engine, model, renderer, route or [], accept_unproven),
            concurrency=concurrency,
            sandbox=sandbox,
            out=out,
            require_spread=require_spread,
        )
    )


@app.command()
def show(
    target: Annotated[str, typer.Argument(metavar="RUN|RUN/SESSION|SESSION", help="A run, or one of its sessions.")],
    run: Annotated[
        Path | None, typer.Option(help="Run of a session that is named alone.", show_default="any below runs/")
    ] = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Show each trained token with its log-probability.")] = False,
    tokens: Annotated[bool | None, typer.Option("--tokens/--messages", help="Show only one of them.", show_default=False)] = None,
    builder: Builder = "prefix_merging",
) -> None:
    """Show the tasks and sessions of a run, or the messages and tokens of one session.

    Trained tokens stand out from their context, by colour or in ⟦ ⟧.

    Example: `polar show runs/demo`, then `polar show runs/demo/SESSION --logprobs`
    """
    from polar.cli.show import show_command

    show_command(target, run=run, logprobs=logprobs, only_tokens=tokens is True, only_messages=tokens is False, builder=builder)


@app.command()
def audit(
    run: CapturedArgument,
    rescore: Annotated[
        str | None,
        typer.Option(metavar="URL|embedded", help="Compute all log-probabilities again with this engine.", show_default=False),
    ] = None,
) -> None:
    """Prove from what is stored alone that every trained token is a token that the policy sampled.

    Exits with 1 if anything does not hold. The files are only read.

    Example: `polar audit runs/demo --rescore embedded`
    """
    from polar.cli.audit import audit_command

    raise typer.Exit(audit_command(run, rescore=rescore))


@app.command()
def export(
    run: RunArgument,
    format: Annotated[
        Literal["json", "parquet", "safetensors", "forest", "sft"],
        typer.Option(
            help="json: a session per line. parquet: a row per trace, for `datasets`. safetensors: flat arrays. "
            "forest: likewise, with what sequences share once. sft: a chat per line."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="in RUN, named after the format")] = None,
    builder: Builder = "prefix_merging",
    only: Annotated[Literal["completed"] | None, typer.Option(help="Leave out other sessions.", show_default=False)] = None,
    longest: Annotated[bool, typer.Option("--longest", help="For sft: only the longest trace of each session.")] = False,
    min_reward: Annotated[
        float | None, typer.Option(help="For sft: leave out sessions that earned less.", show_default="1: solved ones only")
    ] = None,
    auxiliary: Annotated[Treatment, typer.Option(help="Titles, quota checks and other side calls.")] = "exclude",
    aborted: Annotated[Treatment, typer.Option(help="Answers that were not sampled to their end.")] = "exclude",
    superseded: Annotated[Treatment, typer.Option(help="Answers in whose place another was asked.")] = "exclude",
    truncated: Annotated[Treatment, typer.Option(help="Other answers that were cut by length.")] = "train",
) -> None:
    """Write the traces of a run for a trainer: the last finished attempt of every sample that has a reward.

    What may be trained or not is yours to say: train or exclude auxiliary, aborted, superseded and truncated answers.

    Example: `polar export runs/demo --format parquet`
    """
    from polar.cli.export import Wanted, export_command
    from polar.specs import TrainingPolicy

    policy = TrainingPolicy(auxiliary, aborted, superseded, truncated)
    export_command(run, Wanted(format, builder, longest, min_reward, policy), out=out, only=only)


@app.command()
def gateway(
    out: Annotated[Path, typer.Option(help="Folder for what is captured; sessions that it holds go on.")],
    engine: EngineOption = "embedded",
    model: ModelOption = "",
    renderer: RendererOption = "auto",
    route: RouteOption = None,
    accept_unproven: UnprovenOption = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8100,
) -> None:
    """Serve the gateway alone, for harnesses that something else starts.

    Sessions are opened over HTTP with the control key, which is $POLAR_CONTROL_KEY, or a new one that is printed.

    Example: `polar gateway --engine http://127.0.0.1:8000 --out runs/mine`
    """
    from polar.cli.gateway import gateway_command
    from polar.cli.serving import serving

    options = serving(engine, model, renderer, route or [], accept_unproven)
    raise typer.Exit(gateway_command(out, serving=options, host=host, port=port))


@engine_app.command("serve")
def engine_serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="`laptop`, `smollm2`, or a Hugging Face model directory.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and reply together.", show_default="the model's")
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Precision of the weights.")] = "float32",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that generate at the same time.")] = 16,
    kv_cache_gib: Annotated[float, typer.Option(help="Memory for keys and values.")] = 2.0,
) -> None:
    """Serve a model on this machine's CPU, with vLLM's token routes.

    Example: `polar engine serve smollm2 --port 8000`
    """
    from polar.cli.engine import serve_command

    serve_command(
        model,
        host=host,
        port=port,
        max_model_len=max_model_len,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        kv_cache_gib=kv_cache_gib,
    )


@engine_app.command("check")
def engine_check(
    engine: Annotated[str, typer.Argument(metavar="URL|embedded", help="What `--engine` takes elsewhere.")],
    model: ModelOption = "",
    renderer: RendererOption = "auto",
) -> None:
    """Have an engine prove what training relies on, as every run and every gateway does when it starts.

    A few short generations show whether its tokens, log-probabilities and versions are what they should be. What fails is not
    served; what cannot be proven is served with `--accept-unproven`. Exits with 1 if anything fails.

    Example: `polar engine check http://127.0.0.1:8000`
    """
    from polar.cli.engine_check import check_command

    raise typer.Exit(check_command(engine, model=model, renderer=renderer))


@harness_app.command("list")
def harness_list() -> None:
    """List the harnesses, their pinned versions, and which are installed.

    Example: `polar harness list`
    """
    from polar.cli.harness import list_command

    list_command()


@harness_app.command("install")
def harness_install(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Names from `polar harness list`, or `module:Class`.")],
) -> None:
    """Install harnesses at their pinned versions into $POLAR_CACHE.

    Example: `polar harness install pi mini_swe_agent`
    """
    from polar.cli.harness import install_command

    install_command(names)


@harness_app.command("profile")
def harness_profile(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `polar harness list`, or `module:Class`.")],
) -> None:
    """Print what the gateway should know of a harness that you start yourself.

    It is the `profile` of a `POST /sessions` to `polar gateway`.

    Example: `polar harness profile codex`
    """
    from polar.cli.harness import profile_command

    profile_command(name)


@harness_app.command("check")
def harness_check(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Names from `polar harness list`, or `module:Class`.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Check all that come with Polar.")] = False,
    installed_only: Annotated[
        bool, typer.Option("--installed-only", help="With --all: leave out what would have to be installed first.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table, and progress to stderr.")] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Put the rows into this document's table.", show_default=False)
    ] = None,
) -> None:
    """Check that harnesses work here: run each once, unmodified, without a model.

    A harness is installed if it is not, and told to write three files. A scripted
    policy calls its own tools to do so, one and then two at once, through the real
    gateway and in the best sandbox. It works if the files are exactly as asked,
    every call was answered, and what was recorded equals, token for token, what
    the policy was asked and sampled.

    Exits with 1 if one of them does not work; its session is kept for `polar show`.

    Example: `polar harness check pi mini_swe_agent`, or `polar harness check --all`
    """
    from polar.cli.check import check_command

    raise typer.Exit(check_command(names or [], every=every, installed_only=installed_only, markdown=markdown, write=write))


training.register(app)
