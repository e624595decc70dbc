"""Sessions for a trainer that calls and waits: engine, gateway and sandboxes live in a thread with an event loop of its own.

What is sampled is an ordinary run: `polar show`, `polar audit` and `polar export` read its folder, also while it grows.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from threading import Event
from typing import TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from polar.errors import InfrastructureError, PolarError, UsageError
from polar.rollout.folder import RunFolder
from polar.rollout.observer import Observer, Silent
from polar.rollout.runner import PREPARED_AHEAD, Node, RunOptions, check_tasks, first, install, open_node
from polar.rollout.sessions import Attempt
from polar.specs import SessionResult, Task, TrainingPolicy, Trajectory
from polar.store.capture import CaptureReader
from polar.store.captured import trajectory
from polar.store.ledger import Ledger
from polar.training.rollouts import ATTEMPTS
from polar.training.weights import Publisher
from polar.trajectory.builders import RESULT_BUILDER
from polar.trajectory.exclusion import PLAIN
from polar.trajectory.export import Exported

Result = TypeVar("Result")


class Sampler:
    """Runs sessions of tasks, and gives an engine new weights; made by `sampler`. One thread at a time may call it."""

    def __init__(
        self, portal: BlockingPortal, node: Node, tasks: Sequence[Task], concurrency: int, policy: TrainingPolicy
    ) -> None:
        self._portal = portal
        self._node = node
        self._policy = policy
        self._tasks = {task.id: task for task in tasks}
        self._slots = asyncio.Semaphore(concurrency + PREPARED_AHEAD)
        self._next: Counter[str] = Counter()
        for session in node.places.ledger.sessions():
            self._next[session.task_id] = max(self._next[session.task_id], session.sample + 1)
        self._publisher = Publisher(node.backend.policy.engine, node.places.folder.path / "train" / "weights")

    def sample(self, task_ids: Sequence[str]) -> list[Exported]:
        """A session for each of `task_ids`, in their order; one that has no reward has no traces.

        Raises:
            UsageError: there is no such task.
            InfrastructureError: engine, disk, …; or no session has a reward.
        """
        if unknown := sorted(set(task_ids) - self._tasks.keys()):
            raise UsageError(f"expected ids of tasks, got {', '.join(map(repr, unknown))}; there are {', '.join(self._tasks)}")
        return self._done(lambda: self._sample(task_ids))

    def publish(self, save: Callable[[Path], None], version: int) -> None:
        """Have `save` write the weights, and the engine sample from them as `version`.

        Raises:
            EngineError: the engine did not take them.
        """
        self._done(lambda: self._publisher.publish(save, version))

    def _done(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Wait for `work` in the node's thread. An interrupt cancels it, and is raised once all of it has ended."""
        ended = Event()

        async def until_ended() -> Result:
            try:
                return await work()
            finally:
                ended.set()

        running = self._portal.start_task_soon(until_ended)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            ended.wait()
            raise

    async def _sample(self, task_ids: Sequence[str]) -> list[Exported]:
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._node.watch())
                results = await self._results(task_ids)
                watch.cancel()
        except* PolarError as errors:
            raise first(errors) from None
        if all(result.reward is None for result in results):
            last = results[-1]
            raise InfrastructureError(f"none of {len(results)} sessions has a reward: {last.error_kind}: {last.error}")
        return await asyncio.to_thread(self._read, results)

    async def _results(self, task_ids: Sequence[str]) -> list[SessionResult]:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._one(self._tasks[task_id])) for task_id in task_ids]
        return [task.result() for task in running]

    async def _one(self, task: Task) -> SessionResult:
        """A sample, until an attempt at it has a reward."""
        sample = self._next[task.id]
        self._next[task.id] += 1
        for number in range(ATTEMPTS):
            async with self._slots:
                result = await self._node.run(Attempt(task, sample, number))
            if result.reward is not None:
                break
        return result

    def _read(self, results: Sequence[SessionResult]) -> list[Exported]:
        with closing(CaptureReader.open(self._node.places.folder.capture)) as reader:
            return [Exported(result, self._trajectory(reader, result)) for result in results]

    def _trajectory(self, reader: CaptureReader, result: SessionResult) -> Trajectory:
        """Of a session without a reward nothing is looked at: its tokens may be why it has none."""
        if result.reward is None:
            return Trajectory(result.status, (), result.accounting, RESULT_BUILDER, error=result.error)
        return trajectory(reader, result, RESULT_BUILDER, self._policy)


@contextmanager
def sampler(
    tasks: Sequence[Task], options: RunOptions, *, observer: Observer | None = None, policy: TrainingPolicy = PLAIN
) -> Iterator[Sampler]:
    """Engine, gateway and sandboxes while the block lasts; a run that is in `options.out` gets further samples.

    Args:
        policy: what is trained of answers that need not be.

    Raises:
        UsageError: tasks, options or the engine cannot be used for training.
        EngineError: the engine does not start, or does not answer.
    """
    check_tasks(tasks, options)
    told = observer or Silent()
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(_node(tasks, options, told)) as node:
        yield Sampler(portal, node, tasks, options.concurrency, policy)


@asynccontextmanager
async def _node(tasks: Sequence[Task], options: RunOptions, observer: Observer) -> AsyncIterator[Node]:
    folder = RunFolder(options.out)
    folder.path.mkdir(parents=True, exist_ok=True)
    ledger = Ledger.open(folder.ledger)
    try:
        for position, task in enumerate(tasks):
            await ledger.add_task(task, position)
        await install(tasks, observer)
        async with open_node(options, folder, ledger, observer) as node:
            yield node
    finally:
        await ledger.close()
