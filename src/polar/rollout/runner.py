"""A run: tasks in, scored sessions out, everything on disk as it happens."""

import asyncio
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from polar import evaluators, harnesses, sandboxes
from polar.engines.keys import shown
from polar.errors import InfrastructureError, PolarError, UsageError
from polar.gateway.gateway import gateway
from polar.paths import cache_dir
from polar.rollout.connect import Connected, EngineOptions, connected
from polar.rollout.folder import RunFolder
from polar.rollout.observer import Observer
from polar.rollout.sessions import Attempt, Ending, Places, Session, Slots, result_from_store
from polar.specs import SessionResult, Task, Timing
from polar.store.ledger import Ledger
from polar.tasks import checks
from polar.version import __version__

SandboxChoice = Literal["auto", "process", "bubblewrap"]
PREPARED_AHEAD = 2  # sessions that wait for a free run slot
PREPARE_SLOTS = 2
SCORE_SLOTS = 2
EMPTY_SESSIONS = 4  # so many sessions without a model call, and none with one, stop the run (C09)


@dataclass(frozen=True)
class RunOptions:
    """How to run.

    Attributes:
        out: the run's folder; a run that is there goes on.
        engine, model, renderer, routes, accept_unproven: as in `EngineOptions`.
        concurrency: harnesses that run at the same time.
    """

    out: Path
    engine: str = "embedded"
    model: str = ""
    sandbox: SandboxChoice = "auto"
    concurrency: int = 8
    renderer: str = "auto"
    routes: Mapping[str, str] = field(default_factory=dict)
    accept_unproven: bool = False

    @property
    def serving(self) -> EngineOptions:
        return EngineOptions(self.engine, self.model, self.renderer, self.routes, self.accept_unproven)


@dataclass(frozen=True)
class RunSummary:
    """The last attempt of every session of a run, in the order of tasks and samples."""

    out: Path
    results: tuple[SessionResult, ...]


async def run_tasks(tasks: Sequence[Task], options: RunOptions, observer: Observer) -> RunSummary:
    """Run every sample of every task that has no reward yet.

    Cancelling it stops cleanly: harnesses are killed, what they did is recorded, and the same call goes on later.

    Raises:
        UsageError: tasks or options cannot be used.
        InfrastructureError: the engine died, the disk is full, …; finished sessions stay finished.
    """
    check_tasks(tasks, options)
    folder = RunFolder(options.out)
    _make(folder.path)
    async with AsyncExitStack() as stack:
        ledger = Ledger.open(folder.ledger)
        stack.push_async_callback(ledger.close)
        for position, task in enumerate(tasks):
            await ledger.add_task(task, position)
        wanted = _wanted(tasks, ledger)
        observer.planned(sum(task.samples for task in tasks), sum(task.samples for task in tasks) - len(wanted))
        if wanted:
            await install(tasks, observer)
            await _work(wanted, options, folder, ledger, observer, stack)
        return RunSummary(options.out, _latest(tasks, ledger))


def check_tasks(tasks: Sequence[Task], options: RunOptions) -> None:
    """Find out before anything is started what cannot work."""
    if not tasks:
        raise UsageError("there are no tasks to run")
    if options.concurrency < 1:
        raise UsageError(f"--concurrency: expected at least 1, got {options.concurrency}")
    for task in tasks:
        checks.check(task)
        harnesses.get(task.harness.name).check(task.harness)
        evaluators.get(task.evaluator.kind)
    twice = [task_id for task_id, count in Counter(task.id for task in tasks).items() if count > 1]
    if twice:
        raise UsageError(f"task ids must be unique; {', '.join(map(repr, twice))} is there more than once")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}; name a directory that can be made or written") from None


async def install(tasks: Sequence[Task], observer: Observer) -> None:
    """Install the harnesses of `tasks` that are not there."""
    loop = asyncio.get_running_loop()

    def report(line: str) -> None:
        loop.call_soon_threadsafe(observer.note, line)

    for name in sorted({task.harness.name for task in tasks}):
        harness = harnesses.get(name)
        if not harness.installed(cache_dir()):
            await asyncio.to_thread(harness.install, cache_dir(), report)


async def _work(
    wanted: Sequence[Attempt], options: RunOptions, folder: RunFolder, ledger: Ledger, observer: Observer, stack: AsyncExitStack
) -> None:
    """Start engine, gateway and sandboxes, and run what is wanted."""
    node = await stack.enter_async_context(open_node(options, folder, ledger, observer))
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(node.watch())
            await _run_all(wanted, node.places, options.concurrency)
            watch.cancel()
    except* PolarError as errors:
        raise first(errors) from None


@dataclass(frozen=True)
class Node:
    """What sessions run on: engine, gateway and sandboxes that are up, and how many of them at a time."""

    backend: Connected
    places: Places
    slots: Slots

    async def run(self, attempt: Attempt) -> SessionResult:
        """One session from its sandbox to its score; whoever calls it bounds how many are under way.

        Raises:
            StoreError: results cannot be recorded.
        """
        result = await Session(attempt, self.places).live(self.slots, lambda: None)
        assert result is not None, "only a session that was cancelled has none"
        return result

    async def watch(self) -> None:
        """Wait until the engine dies, and raise that; returns at once for an engine that somebody else runs."""
        if self.backend.process is not None:
            raise await self.backend.process.wait_dead()


@asynccontextmanager
async def open_node(options: RunOptions, folder: RunFolder, ledger: Ledger, observer: Observer) -> AsyncIterator[Node]:
    """Start engine, gateway and sandboxes for a run's folder; sessions that an earlier process left open are closed.

    Raises:
        UsageError: the folder's run had another model, renderer or sandbox, or the options cannot be used.
        EngineError: the engine does not start, or does not answer.
    """
    async with AsyncExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="polar-"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        factory = sandboxes.choose(options.sandbox, scratch)
        observer.note(f"sandbox: {factory.kind}")
        backend = await stack.enter_async_context(connected(options.serving, log=folder.engine_log, note=observer.note))
        await _settle_meta(ledger, backend, options, factory.kind)
        serving = await stack.enter_async_context(gateway(backend.policy, folder.capture, routes=backend.routes))
        places = Places(folder, ledger, serving, factory, observer)
        await _close_interrupted(places)
        yield Node(backend, places, _slots(options.concurrency))


def _slots(concurrency: int) -> Slots:
    return Slots(*(asyncio.Semaphore(n) for n in (PREPARE_SLOTS, concurrency, SCORE_SLOTS)))


def first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group, however deep it lies."""
    error = errors.exceptions[0]
    return first(error) if isinstance(error, BaseExceptionGroup) else error


async def _run_all(wanted: Sequence[Attempt], places: Places, concurrency: int) -> None:
    """Start sessions in order, so many at a time; return when the last has ended.

    The group is theirs alone: when the run stops, each is cancelled exactly once, and can record how it ended.
    """
    slots = _slots(concurrency)
    ahead = asyncio.Semaphore(concurrency + PREPARED_AHEAD)
    silent = _SilenceGuard(min(EMPTY_SESSIONS, len(wanted)))
    async with asyncio.TaskGroup() as sessions:
        for attempt in wanted:
            await ahead.acquire()
            sessions.create_task(_one(Session(attempt, places), slots, ahead, silent))


async def _one(session: Session, slots: Slots, ahead: asyncio.Semaphore, silent: "_SilenceGuard") -> None:
    result = await session.live(slots, ahead.release)
    if result is not None:
        silent.see(result)


class _SilenceGuard:
    """Stops a run in which no harness ever calls the model (C09)."""

    def __init__(self, patience: int) -> None:
        self._left = patience

    def see(self, result: SessionResult) -> None:
        """Count a finished session.

        Raises:
            InfrastructureError: the first sessions were all without a model call.
        """
        if result.error_kind != "no_model_calls":
            self._left = -1
        elif self._left > 0:
            self._left -= 1
        if self._left == 0:
            raise InfrastructureError(f"no session called the model, so the run was stopped. The last one: {result.error}")


async def _settle_meta(ledger: Ledger, backend: Connected, options: RunOptions, sandbox: str) -> None:
    """Write down what the run runs on; a run that goes on must go on with the same.

    Raises:
        UsageError: the folder's run had another model, renderer or sandbox.
    """
    settings = {
        "engine": shown(options.engine),
        "model": backend.policy.info.model,
        "model_path": str(backend.model_path or ""),
        "renderer": backend.policy.renderer.name if backend.policy.renderer else "chat",
        "routes": ", ".join(f"{name}={shown(address)}" for name, address in options.routes.items()),
        "self_test": "; ".join(test.line for test in backend.tested.values()),
        "sandbox": sandbox,
        "polar_version": __version__,
    }
    before = ledger.meta()
    for name in ("model", "renderer", "sandbox"):
        if before.get(name, settings[name]) != settings[name]:
            raise UsageError(
                f"{options.out} was run with {name} {before[name]!r}, now it would be {settings[name]!r}: "
                "start the run with what it had, or choose another --out"
            )
    if "created" not in before:
        settings["created"] = f"{time.time():.3f}"
    for name, value in settings.items():
        await ledger.set_meta(name, value)


async def _close_interrupted(places: Places) -> None:
    """Sessions that an earlier process left open are over: what they captured is kept and accounted for."""
    tasks = {task.id: task for task in places.ledger.tasks()}
    for left in places.ledger.sessions():
        if left.result is None:
            await places.gateway.sessions.freeze(left.session_id)
            attempt = Attempt(tasks[left.task_id], left.sample, left.attempt)
            ending = Ending("cancelled", error="the run was interrupted", kind="cancelled")
            result = await asyncio.to_thread(result_from_store, places.folder.capture, left.session_id, attempt, ending, Timing())
            await places.ledger.finish(result)


def _wanted(tasks: Sequence[Task], ledger: Ledger) -> list[Attempt]:
    """The samples that have no reward yet, in order of tasks and samples, each as a new attempt."""
    attempts: dict[tuple[str, int], int] = {}
    done: set[tuple[str, int]] = set()
    for session in ledger.sessions():
        place = (session.task_id, session.sample)
        attempts[place] = session.attempt + 1
        if session.result is not None and session.result.reward is not None:
            done.add(place)
    return [
        Attempt(task, sample, attempts.get((task.id, sample), 0))
        for task in tasks
        for sample in range(task.samples)
        if (task.id, sample) not in done
    ]


def _latest(tasks: Sequence[Task], ledger: Ledger) -> tuple[SessionResult, ...]:
    """The result of each sample's last finished attempt, for the tasks at hand."""
    asked = {task.id for task in tasks}
    last = {(s.task_id, s.sample): s.result for s in ledger.sessions() if s.task_id in asked and s.result}
    return tuple(last.values())
