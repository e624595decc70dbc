"""How fast supervised training goes, how long, and that it learns what was said."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from polar.chat import Message, TextPart
from polar.engines.renderers import load_renderer
from polar.training.chats import chat_forest, whole
from polar.training.config import ModelSpec, OptimizerSpec, TrainConfig
from polar.training.learner import Learner
from polar.training.policy import load_policy
from polar.training.supervised import SftSpec, rate, supervise
from polar.trajectory.forest import Forest
from tests.training.models import tiny_dir


def test_the_rate_rises_in_a_line_and_falls_to_a_tenth() -> None:
    spec = SftSpec(steps=100, lr=1.0, warmup_steps=4)
    assert [rate(spec, step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(spec, 4) == 1.0
    assert rate(spec, 52) == pytest.approx(0.55)
    assert rate(spec, 100) == pytest.approx(0.1)


def test_a_rate_without_decay_stays() -> None:
    assert {rate(SftSpec(10, 0.5, decay="none"), step) for step in range(10)} == {0.5}


def trained(folder: Path, spec: SftSpec, batches: int, stop: int = 0) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    model = tiny_dir(folder / "model")
    renderer = load_renderer(model)
    config = TrainConfig(model=ModelSpec(str(model)), optimizer=OptimizerSpec(lr=spec.lr))
    lines: list[dict[str, float]] = []

    def chats() -> Iterator[list[Forest]]:
        for _ in range(batches):
            pairs = [
                (Message("user", (TextPart(f"say {word}"),)), Message("assistant", (TextPart(word),))) for word in ("mo", "tevi")
            ]
            yield [chat_forest(renderer, whole(pair, ()), str(place)) for place, pair in enumerate(pairs)]

    def told(step: int, values: dict[str, float]) -> bool:
        lines.append(values | {"step": step})
        return step == stop

    supervise(Learner(load_policy(model, config.model), config), chats(), spec, told)
    return lines


def test_what_was_said_is_learned_at_the_rate_of_the_step(tmp_path: Path) -> None:
    spec = SftSpec(steps=12, lr=1e-2, warmup_steps=3)
    lines = trained(tmp_path, spec, batches=100)
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    assert np.allclose([line["lr"] for line in lines], [rate(spec, step) for step in range(12)])


@pytest.mark.parametrize(("batches", "stop", "made"), [(3, 0, 3), (9, 2, 2), (9, 0, 5)])
def test_it_ends_with_the_batches_when_told_or_after_its_steps(tmp_path: Path, batches: int, stop: int, made: int) -> None:
    assert [line["step"] for line in trained(tmp_path, SftSpec(5, 1e-3), batches, stop)] == [*range(1, made + 1)]
