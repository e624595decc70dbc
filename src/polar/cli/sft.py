"""`polar sft`: supervised fine-tuning on chats."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from polar.cli.console import count, output, plain
from polar.errors import UsageError
from polar.training.chats import Chat, chat_forest, read_chats
from polar.training.config import ModelSpec, OptimizerSpec, TrainConfig
from polar.trajectory.forest import Forest

LINE_EVERY = 10  # steps


def sft_command(
    data: Sequence[Path],
    *,
    model: str,
    out: Path,
    held_out: Path | None,
    epochs: int,
    batch: int,
    lr: float,
    lora_rank: int,
    max_tokens: int,
    seed: int,
) -> None:
    """Train, write the model, and say what it makes of chats that were held out."""
    from polar.engines.embedded.models import resolve
    from polar.engines.renderers import load_renderer
    from polar.training.learner import Learner
    from polar.training.metrics import Metrics
    from polar.training.policy import load_policy
    from polar.training.supervised import SftSpec, held_out_loss, supervise

    console = output()
    directory = resolve(model)
    renderer = load_renderer(directory)
    chats, mute = _read(data)
    apart, _ = _read([held_out]) if held_out else ([], 0)
    config = TrainConfig(
        model=ModelSpec(str(directory), lora_rank=lora_rank, max_tokens=max_tokens), optimizer=OptimizerSpec(lr=lr)
    )
    learner = Learner(load_policy(directory, config.model), config)
    steps = epochs * -(-len(chats) // batch)
    left_out = f", {count(mute)} without a message to learn left out" if mute else ""
    console.print(f"{count(len(chats))} chats{left_out}, {count(steps)} steps with {renderer.name}")
    metrics = Metrics(out)

    def told(step: int, values: dict[str, float]) -> bool:
        metrics.write(step, values)
        if step % LINE_EVERY == 0 or step in (1, steps):
            console.print(plain(f"step {step}/{steps} · loss {values['loss']:.4f} · grad_norm {values['grad_norm']:.3g}"))
        return False

    def forests() -> Iterator[list[Forest]]:
        for epoch in range(epochs):
            order = list(range(len(chats)))
            random.Random(f"{seed}/{epoch}").shuffle(order)
            for start in range(0, len(order), batch):
                yield [chat_forest(renderer, chats[place], f"chat-{place}") for place in order[start : start + batch]]

    def loss() -> float:
        held = [chat_forest(renderer, chat, f"held-out-{place}") for place, chat in enumerate(apart)]
        return held_out_loss(learner, (held[start : start + batch] for start in range(0, len(held), batch)))

    before = loss() if apart else None
    supervise(learner, forests(), SftSpec(steps, lr, warmup_steps=max(1, steps // 20)), told)
    learner.policy.save(out / "model")
    if before is not None:
        console.print(f"held-out loss {loss():.4f} nats a token, before {before:.4f} ({count(len(apart))} chats)")
    console.print(f"\nnext: polar eval TASKS --model {out / 'model'}", soft_wrap=True)


def _read(files: Sequence[Path]) -> tuple[list[Chat], int]:
    """Chats of which something can be learned, and how many others there are.

    Raises:
        UsageError: there are none.
    """
    read = [chat for path in files for chat in read_chats(path)]
    chats = [chat for chat in read if chat.trained]
    if not chats:
        names = ", ".join(map(str, files))
        raise UsageError(f"nothing to learn in {names}: expected JSONL chats, as `polar export --format sft` writes them")
    return chats, len(read) - len(chats)
