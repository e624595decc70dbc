"""`polar train`: reinforcement learning from a configuration."""

import os
from pathlib import Path

import msgspec
from rich.console import Console

from polar.cli.console import log_warnings, output, plain
from polar.cli.interrupt import Stopped, drive
from polar.cli.progress import Progress
from polar.cli.runs import RUNS
from polar.errors import InfrastructureError
from polar.specs import SessionResult, Task
from polar.tasks.files import Overrides, load
from polar.training.config import TrainConfig, load_config

NOTHING_LOST = "nothing is lost: the same command goes on where this stopped"
SHOWN = ("reward", "pass@1", "loss", "delta", "entropy", "clip_share", "grad_norm", "seconds/rollout", "seconds/train")


class _Watcher(Progress):
    """Shows sessions as `polar run` does, and a line for each step; satisfies `Watcher`."""

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__(console)
        self.planned(0, 0)
        self._step, self._steps = 0, steps

    def finished(self, result: SessionResult) -> None:
        super().finished(result)
        self._sessions += 1

    def trained(self, step: int, steps: int, values: dict[str, float]) -> None:
        self._step = step
        parts = [f"{name} {values[name]:.3g}" for name in SHOWN if name in values]
        self._console.print(plain(f"step {step}/{steps} · {' · '.join(parts)}"), soft_wrap=True)

    @property
    def line(self) -> str:
        return f"step {self._step + 1} of {self._steps} · {super().line}"


def train_command(path: Path, *, out: Path | None, steps: int | None) -> int:
    """Train, and say how to go on; the exit status."""
    config = load_config(path)
    if steps is not None:
        config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=steps))
    if int(os.environ.get("RANK", "0")):  # `torchrun` started several processes, of which the first leads and shows
        return _accompany(config)
    console = output()
    log_warnings()
    folder = out or RUNS / path.resolve().stem
    watcher = _Watcher(console, config.run.steps)
    try:
        with watcher.shown():
            drive(
                _train(config, _tasks(config, path), folder, watcher),
                lambda: watcher.note("stopping; Ctrl-C again stops at once"),
            )
    except Stopped as stopped:
        console.print(plain(f"stopped; {NOTHING_LOST}", "yellow"), soft_wrap=True)
        return stopped.status
    except InfrastructureError:
        watcher.note(f"the run in {folder} ended early; {NOTHING_LOST}")
        raise
    console.print(
        f"\nnext: polar plot {folder}   polar show {folder}   polar eval TASKS --model {folder / 'model'}", soft_wrap=True
    )
    return 0


def _accompany(config: TrainConfig) -> int:
    from polar.training.loop import accompany

    accompany(config)
    return 0


async def _train(config: TrainConfig, tasks: list[Task], out: Path, watcher: _Watcher) -> None:
    from polar.training.loop import train

    async with watcher.told():
        await train(config, tasks, out, watcher)


def _tasks(config: TrainConfig, path: Path) -> list[Task]:
    """The tasks that a configuration names; files stand beside it."""
    beside = path.resolve().parent
    sources = [str(beside / source) if (beside / source).exists() else source for source in config.tasks.sources]
    tasks = load(sources, Overrides(config.tasks.harness or None, None))
    sampling = config.tasks.sampling
    return tasks if sampling is None else [msgspec.structs.replace(task, sampling=sampling) for task in tasks]
