"""Groups of sessions for the trainer, in an order that only the seed decides, from the runner's own parts.

A training run's folder is an ordinary run: group after group, a task gets further samples. A sample that has a reward in the
ledger is not run again.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from msgspec import Struct

from polar.errors import UsageError
from polar.rollout.folder import RunFolder
from polar.rollout.runner import PREPARED_AHEAD, Node
from polar.rollout.sessions import Attempt
from polar.specs import SessionResult, Task
from polar.store.capture import CaptureReader
from polar.store.captured import captured, trained_forest
from polar.store.ledger import LedgerReader
from polar.training.config import RolloutSpec
from polar.training.groups import Group, Sample
from polar.trajectory.forest import Forest, join

ATTEMPTS = 3  # at a sample that infrastructure fails
NOTHING = join([])


class GroupRecord(Struct, frozen=True):
    """Which sessions made a group."""

    task_id: str
    number: int
    sessions: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where group `number` of a run stands: samples `first` to `first + size` of a task."""

    task: Task
    number: int
    first: int


class Order:
    """Which task comes when: all of them in a shuffled order, then all again in another."""

    def __init__(self, tasks: Sequence[Task], seed: int, group_size: int) -> None:
        self._tasks = tasks
        self._seed = seed
        self._size = group_size

    def place(self, number: int) -> Place:
        """Where group `number` stands."""
        visit, at = divmod(number, len(self._tasks))
        order = list(range(len(self._tasks)))
        random.Random(f"{self._seed}/{visit}").shuffle(order)
        return Place(self._tasks[order[at]], number, visit * self._size)


class Rollouts:
    """Runs groups on a node."""

    def __init__(self, node: Node, order: Order, spec: RolloutSpec) -> None:
        self._node = node
        self._order = order
        self._spec = spec
        self._folder = node.places.folder
        self._slots = asyncio.Semaphore(spec.concurrency + PREPARED_AHEAD)
        self._attempts: dict[tuple[str, int], int] = {}
        self._done: dict[tuple[str, int], SessionResult] = {}
        for session in node.places.ledger.sessions():
            key = (session.task_id, session.sample)
            self._attempts[key] = session.attempt + 1
            if session.result is not None and session.result.reward is not None:
                self._done[key] = session.result

    async def group(self, number: int) -> Group:
        """Run the sessions of group `number` that have no reward yet."""
        place = self._order.place(number)
        async with asyncio.TaskGroup() as sessions:
            running = [
                sessions.create_task(self._sample(place.task, place.first + each)) for each in range(self._spec.group_size)
            ]
        results = [task.result() for task in running]
        forests = await asyncio.to_thread(read_forests, self._folder, results, self._spec)
        samples = tuple(map(Sample, results, forests))
        return Group(place.task.id, number, samples)

    async def _sample(self, task: Task, sample: int) -> SessionResult:
        key = (task.id, sample)
        for _ in range(ATTEMPTS):
            if key in self._done:
                break
            async with self._slots:
                attempt = self._attempts.get(key, 0)
                self._attempts[key] = attempt + 1
                last = await self._node.run(Attempt(task, sample, attempt))
            if last.reward is not None:
                self._done[key] = last
        return self._done.get(key) or last


def read_forests(folder: RunFolder, results: Sequence[SessionResult], spec: RolloutSpec) -> list[Forest]:
    """What of sessions can be trained, from the store; of those without a reward nothing is, and nothing is looked at."""
    with closing(CaptureReader.open(folder.capture)) as reader:
        return [NOTHING if result.reward is None else trained_forest(reader, result, spec.policy) for result in results]


def recorded(folder: RunFolder, records: Sequence[GroupRecord], spec: RolloutSpec) -> list[Group]:
    """Groups as they were, from the store.

    Raises:
        UsageError: a session of theirs is not there any more.
    """
    with closing(LedgerReader.open(folder.ledger)) as ledger:
        results = {session.session_id: session.result for session in ledger.sessions()}
    groups = []
    for record in records:
        found = [results.get(session_id) for session_id in record.sessions]
        known = [result for result in found if result is not None]
        if len(known) < len(found):
            raise UsageError(f"{folder.path}: sessions of task {record.task_id} that were trained on are gone; start a new run")
        groups.append(Group(record.task_id, record.number, tuple(map(Sample, known, read_forests(folder, known, spec)))))
    return groups


def busy_seconds(folder: RunFolder, session_ids: Sequence[str], since: float, until: float) -> float:
    """How long between two moments (unix seconds) at least one call of these sessions was with the engine."""
    spans: list[tuple[float, float]] = []
    with closing(CaptureReader.open(folder.capture)) as reader:
        for session_id in session_ids:
            for call in captured(reader, session_id).calls:
                start, end = max(call.timings.sent, since), min(call.timings.last_token, until)
                if call.timings.sent and end > start:
                    spans.append((start, end))
    busy, reached = 0.0, since
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy
