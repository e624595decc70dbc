"""Which groups are under way, and which of them make the next batch.

- `sync`: the groups of a batch start when it is wanted, so they are sampled from the newest weights.
- `one_step_off`: those of the next batch start when a batch is taken, and run while it is trained; at most one version old.
- `async`: so many groups are always under way that weights can change `max_staleness` times before the last of them is wanted.
  A batch takes those that ended first; one with tokens that are older is left out.
"""

import asyncio
from collections.abc import Awaitable, Callable

from msgspec import Struct

from polar.training.config import RolloutSpec
from polar.training.groups import Group

Roll = Callable[[int], Awaitable[Group]]


class Cursor(Struct, frozen=True):
    """Which groups no batch has seen: those that are `pending`, and all from `next` on."""

    next: int = 0
    pending: tuple[int, ...] = ()


class Feed:
    """Groups by number, run ahead as far as the schedule allows.

    Attributes:
        too_old: groups that were left out for their staleness.
    """

    def __init__(self, roll: Roll, spec: RolloutSpec, cursor: Cursor) -> None:
        self._roll = roll
        self._spec = spec
        self._ahead = {"sync": 0, "one_step_off": 1, "async": spec.max_staleness}[spec.schedule]
        self._running: dict[int, asyncio.Task[Group]] = {}
        self._waiting = list(cursor.pending)
        self._next = cursor.next
        self.too_old = 0

    async def take(self, version: int) -> list[Group]:
        """The groups of the next batch, which weights of `version` will train on; in the order of their numbers.

        Raises:
            ExceptionGroup: a group failed; nothing more is to be taken.
        """
        wanted = self._spec.groups
        self._start(wanted)
        found: list[Group] = []
        while len(found) < wanted:
            for task in await self._ended(wanted - len(found)):
                group = task.result()
                if self._fits(group, version):
                    found.append(group)
                else:
                    self.too_old += 1
                    self._start(wanted - len(found))
        self._start(wanted * self._ahead)
        return sorted(found, key=lambda group: group.number)

    @property
    def cursor(self) -> Cursor:
        """Where a feed goes on that takes this one's place."""
        return Cursor(self._next, (*sorted(self._running), *self._waiting))

    async def close(self) -> None:
        """Stop what runs."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()

    def _start(self, wanted: int) -> None:
        """Have at least `wanted` groups under way or ended."""
        while len(self._running) < wanted:
            number = self._waiting.pop(0) if self._waiting else self._next
            self._next = max(self._next, number + 1)
            self._running[number] = asyncio.ensure_future(self._roll(number))

    async def _ended(self, most: int) -> list[asyncio.Task[Group]]:
        """Wait for the next groups: the one with the lowest number, or in `async` whichever ends first."""
        if self._spec.schedule == "async":
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
            numbers = [number for number, task in self._running.items() if task.done()][:most]
        else:
            numbers = [min(self._running)]
            await asyncio.wait([self._running[number] for number in numbers])
        return [self._running.pop(number) for number in numbers]

    def _fits(self, group: Group, version: int) -> bool:
        if self._spec.schedule != "async":
            return True
        oldest = [
            int(part[part >= 0].min()) for part in (each.forest.policy_versions for each in group.usable) if (part >= 0).any()
        ]
        return version - min(oldest, default=version) <= self._spec.max_staleness
