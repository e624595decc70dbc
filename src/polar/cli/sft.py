"""`polar sft`: supervised fine-tuning on chats."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from polar.cli.console import count, output, plain
from polar.errors import UsageError
from polar.training.chats import chat_forest, read_chats
from polar.training.config import ModelSpec, OptimizerSpec, TrainConfig
from polar.trajectory.forest import Forest

LINE_EVERY = 10  # steps


def sft_command(
    data: Sequence[Path], *, model: str, out: Path, epochs: int, batch: int, lr: float, lora_rank: int, max_tokens: int, seed: int
) -> None:
    """Train, and write the model."""
    from polar.engines.embedded.models import resolve
    from polar.engines.renderers import load_renderer
    from polar.training.learner import Learner
    from polar.training.metrics import Metrics
    from polar.training.policy import load_policy
    from polar.training.supervised import SftSpec, supervise

    console = output()
    directory = resolve(model)
    renderer = load_renderer(directory)
    read = [chat for path in data for chat in read_chats(path)]
    chats = [chat for chat in read if chat.trained]
    if not chats:
        files = ", ".join(map(str, data))
        raise UsageError(f"nothing to learn in {files}: expected JSONL chats, as `polar export --format sft` writes them")
    config = TrainConfig(
        model=ModelSpec(str(directory), lora_rank=lora_rank, max_tokens=max_tokens), optimizer=OptimizerSpec(lr=lr)
    )
    learner = Learner(load_policy(directory, config.model), config)
    steps = epochs * -(-len(chats) // batch)
    left_out = f", {count(len(read) - len(chats))} without a message to learn left out" if len(chats) < len(read) else ""
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

    supervise(learner, forests(), SftSpec(steps, lr, warmup_steps=max(1, steps // 20)), told)
    learner.policy.save(out / "model")
    console.print(f"\nnext: polar eval TASKS --model {out / 'model'}", soft_wrap=True)
