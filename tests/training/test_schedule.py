"""Which groups make a batch, and how old their tokens may be."""

import asyncio

import numpy as np
import pytest

from polar.specs import Accounting, SessionResult, Timing
from polar.training.config import RolloutSpec, Schedule
from polar.training.groups import Group, Sample
from polar.training.schedule import Cursor, Feed
from tests.training.forests import random_forest


def group(number: int, version: int) -> Group:
    """A group whose tokens were all sampled under `version`."""
    from dataclasses import replace

    forest = random_forest(number, sessions=1)
    forest = replace(forest, policy_versions=np.where(forest.loss_mask, version, -1).astype(np.int32))
    result = SessionResult(f"s{number}", "t", 0, "completed", 1.0, 1, 1, Accounting(), Timing())
    return Group("t", number, (Sample(result, forest),))


class Machine:
    """Rolls groups out, each as long as its number says, under the version that holds when it starts."""

    def __init__(self, slow: int = 0) -> None:
        self.version = 0
        self.started: list[int] = []
        self._slow = slow

    async def roll(self, number: int) -> Group:
        self.started.append(number)
        version = self.version
        await asyncio.sleep(0.05 if self._slow and number % self._slow == 0 else 0)
        return group(number, version)


async def batches(schedule: Schedule, steps: int, machine: Machine, **changes: int) -> list[list[Group]]:
    feed = Feed(machine.roll, RolloutSpec(schedule=schedule, groups=2, **changes), Cursor())  # type: ignore[arg-type]
    taken = []
    for step in range(steps):
        taken.append(await feed.take(step))
        await asyncio.sleep(0)  # training, meanwhile
        machine.version = step + 1
    await feed.close()
    return taken


def ages(taken: list[list[Group]]) -> list[int]:
    """How many versions behind the oldest token of each batch is."""
    return [step - min(int(each.samples[0].forest.policy_versions.max()) for each in groups) for step, groups in enumerate(taken)]


async def test_sync_takes_groups_in_order_from_the_newest_weights() -> None:
    machine = Machine()
    taken = await batches("sync", 4, machine)
    assert [[each.number for each in groups] for groups in taken] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ages(taken) == [0, 0, 0, 0]
    assert machine.started == list(range(8)), "nothing runs that is not trained"


async def test_one_step_off_runs_the_next_batch_while_one_is_trained() -> None:
    machine = Machine()
    taken = await batches("one_step_off", 4, machine)
    assert [[each.number for each in groups] for groups in taken] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ages(taken) == [0, 1, 1, 1]


@pytest.mark.parametrize("max_staleness", [1, 3])
async def test_async_takes_what_ends_first_and_nothing_that_is_too_old(max_staleness: int) -> None:
    machine = Machine(slow=3)
    taken = await batches("async", 12, machine, max_staleness=max_staleness)
    assert all(len(groups) == 2 for groups in taken)
    assert max(ages(taken)) <= max_staleness
    numbers = [each.number for groups in taken for each in groups]
    assert len(set(numbers)) == len(numbers)
    assert len(machine.started) <= 24 + 2 * (1 + max_staleness) + 12, "back-pressure: rollouts do not run away"


async def test_a_feed_goes_on_with_what_no_batch_has_seen() -> None:
    machine = Machine()
    feed = Feed(machine.roll, RolloutSpec(schedule="one_step_off", groups=2), Cursor())
    await feed.take(0)
    cursor = feed.cursor
    await feed.close()
    assert cursor == Cursor(4, (2, 3))
    again = Feed(machine.roll, RolloutSpec(schedule="sync", groups=3), cursor)
    assert [each.number for each in await again.take(1)] == [2, 3, 4]


async def test_a_group_that_fails_ends_the_run() -> None:
    async def roll(number: int) -> Group:
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        await Feed(roll, RolloutSpec(groups=1), Cursor()).take(0)
