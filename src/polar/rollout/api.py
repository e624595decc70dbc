"""The Python API: the same nouns as the command line.

from polar import Task, run

done = run([Task(id="hello", instruction="Say hello.", samples=4)])
done.pass_at_1, done.trajectories()
"""

import asyncio
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec

from polar.rollout.folder import RunFolder
from polar.rollout.observer import Observer, Silent
from polar.rollout.runner import RunOptions, RunSummary, SandboxChoice, run_tasks
from polar.specs import Accounting, BuilderName, HarnessSpec, SessionResult, Task, Trajectory
from polar.store.capture import CaptureReader
from polar.store.captured import trajectory


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
        out: its folder, for `polar show`, `polar audit` and `polar export`.
        sessions: the last attempt of each sample, in the order of tasks and samples.
    """

    out: Path
    sessions: tuple[SessionResult, ...]

    @property
    def pass_at_1(self) -> float | None:
        """Share of solved ones among the scored sessions; None where none was scored."""
        solved = [session.solved for session in self.sessions if session.reward is not None]
        return sum(solved) / len(solved) if solved else None

    @property
    def accounting(self) -> Accounting:
        """Tokens of all sessions together."""
        return sum((session.accounting for session in self.sessions), Accounting())

    def trajectories(self, builder: BuilderName = "prefix_merging") -> list[Trajectory]:
        """The traces of each session that has a reward, built from the store; the others have nothing to train.

        Raises:
            CaptureError: tokens of a session cannot be trusted.
        """
        with closing(CaptureReader.open(RunFolder(self.out).capture)) as reader:
            return [trajectory(reader, session, builder) for session in self.sessions if session.reward is not None]


def run(
    tasks: Sequence[Task],
    *,
    out: Path | str | None = None,
    harness: str | None = None,
    samples: int | None = None,
    engine: str = "embedded",
    model: str = "",
    sandbox: SandboxChoice = "auto",
    concurrency: int = 8,
    renderer: str = "auto",
    routes: Mapping[str, str] = MappingProxyType({}),
    accept_unproven: bool = False,
    observer: Observer | None = None,
) -> Run:
    """Run tasks and wait for the end; works in scripts and in notebooks.

    Args:
        out: the run's folder; the same call again goes on with what is not finished. None makes a temporary one.
        harness, samples: override those of the tasks.
        engine, model, renderer, routes, accept_unproven: as in `polar run`; `routes` by the name of the requested model.

    Raises:
        UsageError: tasks or options cannot be used.
        InfrastructureError: the engine died, the disk is full, …; the same call goes on.
    """
    folder = Path(out) if out is not None else Path(tempfile.mkdtemp(prefix="polar-run-"))
    options = RunOptions(folder, engine, model, sandbox, concurrency, renderer, routes, accept_unproven)
    wanted = [_override(task, harness, samples) for task in tasks]
    summary = _wait(lambda: asyncio.run(run_tasks(wanted, options, observer or Silent())))
    return Run(summary.out, summary.results)


def _override(task: Task, harness: str | None, samples: int | None) -> Task:
    return msgspec.structs.replace(
        task,
        harness=HarnessSpec(harness) if harness and harness != task.harness.name else task.harness,
        samples=task.samples if samples is None else samples,
    )


def _wait(work: Callable[[], RunSummary]) -> RunSummary:
    """Run `work` here, or in a thread of its own where an event loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    outcome: list[RunSummary | BaseException] = []

    def target() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=target, name="polar run")
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
