"""Numbers are written as they come, and a run that goes on forgets those that it makes again."""

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from polar.errors import UsageError
from polar.training.curves import draw, smoothed
from polar.training.metrics import FILE, Metrics, read


def test_each_step_is_a_line_that_can_be_read_at_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.write(1, {"reward": 0.5, "loss": math.nan})
    (line,) = read(tmp_path / FILE)
    assert (line["step"], line["reward"]) == (1, 0.5)
    assert "loss" not in line


def test_steps_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    for step in range(1, 5):
        metrics.write(step, {"reward": float(step)})
    metrics.resume(2)
    metrics.write(3, {"reward": 30.0})
    assert [(line["step"], line["reward"]) for line in read(tmp_path / FILE)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_line_that_was_cut_by_a_crash_is_left_out(tmp_path: Path) -> None:
    Metrics(tmp_path).write(1, {"reward": 1.0})
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"step": 2, "rew')
    assert len(read(tmp_path / FILE)) == 1


def test_what_is_no_metrics_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected the metrics of a training run"):
        read(tmp_path / FILE)
    (tmp_path / FILE).write_text("{}\nhello\n{}\n")
    with pytest.raises(UsageError, match=rf"{FILE}:2: expected a line of metrics"):
        read(tmp_path / FILE)


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, ["tensorboard"])
    metrics.write(1, {"reward": 0.25})
    metrics.write(2, {"reward": 0.75})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.25), (2, 0.75)]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(UsageError, match=f"pip install {name}"):
        Metrics(tmp_path, [name])


def test_curves_are_drawn_for_several_runs(tmp_path: Path) -> None:
    for run in ("a", "b", "c/b"):
        metrics = Metrics(tmp_path / run)
        for step in range(1, 4):
            metrics.write(step, {"reward": step / 4})
    assert draw([tmp_path / run for run in ("a", "b", "c/b")], ["reward", "nothing"], tmp_path / "curves.png") == ["reward"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_smoothing_is_the_mean_of_what_came_before() -> None:
    import numpy as np

    assert smoothed(np.asarray([1.0, 2, 3, 4, 5, 6])).tolist() == [1, 1.5, 2, 2.5, 3, 4]
