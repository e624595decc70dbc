"""Numbers are written as they come, and a run that goes on forgets those that it makes again."""

import math
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
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
    Metrics(tmp_path, after=2).write(3, {"reward": 30.0})
    assert [(line["step"], line["reward"]) for line in read(tmp_path / FILE)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_crash_while_steps_are_forgotten_loses_none_that_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(tmp_path)
    for step in (1, 2):
        metrics.write(step, {"reward": float(step)})

    def full(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:7])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        Metrics(tmp_path, after=1)
    assert [line["step"] for line in read(tmp_path / FILE)] == [1, 2]


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


def scalars(folder: Path) -> list[tuple[int, float]]:
    """What TensorBoard shows of the reward."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("reward")]


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    with closing(Metrics(tmp_path, ["tensorboard"])) as metrics:
        metrics.write(1, {"reward": 0.25})
        metrics.write(2, {"reward": 0.75})
    assert scalars(tmp_path) == [(1, 0.25), (2, 0.75)]


@pytest.mark.parametrize("after", [0, 2])
def test_tensorboard_shows_each_step_once_when_a_run_goes_on(tmp_path: Path, after: int) -> None:
    for begin, value in ((0, 0.25), (after, 0.75)):
        with closing(Metrics(tmp_path, ["tensorboard"], begin)) as metrics:
            for step in range(begin + 1, 5):
                metrics.write(step, {"reward": value})
    assert scalars(tmp_path) == [(step, 0.25 if step <= after else 0.75) for step in range(1, 5)]


def test_wandb_knows_a_run_by_what_is_stored_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids: list[str] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: ids.append(options["id"])))
    Metrics(tmp_path / "a" / "run", ["wandb"])
    Metrics(tmp_path / "b" / "run", ["wandb"])
    assert ids[0] != ids[1], "folders of one name are two runs"
    (tmp_path / "a").rename(tmp_path / "c")
    Metrics(tmp_path / "c" / "run", ["wandb"], after=1)
    assert ids[2] == ids[0], "and a run that was moved goes on"


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=f"pip install {name}"):
        Metrics(tmp_path, [name])


def test_curves_are_drawn_for_several_runs(tmp_path: Path) -> None:
    for run in ("a", "b", "c/b"):
        metrics = Metrics(tmp_path / run)
        for step in range(1, 4):
            metrics.write(step, {"reward": step / 4})
    assert draw([tmp_path / run for run in ("a", "b", "c/b")], ["reward", "nothing"], tmp_path / "curves.png") == ["reward"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_each_run_is_drawn_with_its_running_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import pyplot

    metrics = Metrics(tmp_path)
    for step, reward in enumerate((0.0, 1.0, 0.5), start=1):
        metrics.write(step, {"reward": reward})
    with monkeypatch.context() as patch:
        patch.setattr(pyplot, "close", lambda figure: None)
        draw([tmp_path], ["reward"], tmp_path / "curves.svg")
    (panel,) = pyplot.gcf().axes
    pyplot.close()
    assert [np.asarray(line.get_ydata()).tolist() for line in panel.lines] == [[0.0, 1.0, 0.5], [0.0, 0.5, 0.5]]
    assert panel.get_xlabel() == "step (full lines: mean of 5)"


def test_smoothing_is_the_mean_of_what_came_before() -> None:
    assert smoothed(np.asarray([1.0, 2, 3, 4, 5, 6])).tolist() == [1, 1.5, 2, 2.5, 3, 4]
