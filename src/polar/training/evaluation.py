"""What a policy earns on tasks, by harness, and against what it earned before."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from polar.errors import UsageError
from polar.specs import SOLVED, SamplingSpec, SessionResult, Task
from polar.training.intervals import Groups, Interval, difference, pass_at_1, pass_at_k

FILE = "evaluation.json"


class Evaluation(Struct, frozen=True):
    """One harness's result.

    Attributes:
        rewards: by task, of the sessions that have one.
        without: sessions without a reward: infrastructure failed them, and they count neither way.
        sampling: by task, so that two evaluations can be shown to be alike.
        seconds: that a session ran, on average.
    """

    harness: str
    model: str
    rewards: dict[str, tuple[float, ...]]
    without: int
    sampling: dict[str, SamplingSpec]
    calls: float
    tokens: int
    seconds: float

    @property
    def sessions(self) -> int:
        return sum(map(len, self.rewards.values()))

    @property
    def solved(self) -> Groups:
        """For each task, which of its sessions solved it."""
        return [[reward >= SOLVED for reward in earned] for earned in self.rewards.values()]

    @property
    def reward(self) -> float:
        """Mean over tasks of the mean reward."""
        means = [sum(earned) / len(earned) for earned in self.rewards.values() if earned]
        return sum(means) / len(means)

    @property
    def pass_at_1(self) -> Interval:
        return pass_at_1(self.solved)

    def at_k(self, k: int) -> float:
        return pass_at_k(self.solved, k)


def evaluation(harness: str, model: str, tasks: Sequence[Task], results: Sequence[SessionResult]) -> Evaluation:
    """Sum up the sessions of a harness; samples that `tasks` do not ask for, though an earlier command did, are left out.

    Raises:
        UsageError: no session has a reward.
    """
    asked = {task.id: task.samples for task in tasks}
    results = [result for result in results if result.sample < asked[result.task_id]]
    rewards: dict[str, list[float]] = {task.id: [] for task in tasks}
    for result in results:
        if result.reward is not None:
            rewards[result.task_id].append(result.reward)
    if not any(rewards.values()):
        last = results[-1] if results else None
        raise UsageError(f"no session of {harness} has a reward; the last one: {last.error if last else 'there is none'}")
    return Evaluation(
        harness,
        model,
        {task_id: tuple(earned) for task_id, earned in rewards.items()},
        sum(result.reward is None for result in results),
        {task.id: task.sampling for task in tasks},
        sum(result.calls for result in results) / len(results),
        sum(result.accounting.sampled for result in results),
        sum(result.timing.running for result in results) / len(results),
    )


def check_alike(before: Evaluation, tasks: Sequence[Task]) -> None:
    """Find out before anything is run whether an evaluation of `tasks` can be compared with an earlier one.

    Raises:
        UsageError: the earlier one is not of the same tasks, sampled alike, with as many sessions each.
    """
    lost = f" ({before.without} sessions of the earlier one have no reward: its command retries them)" if before.without else ""
    for what, left, right in (
        ("tasks", [*before.rewards], [task.id for task in tasks]),
        ("sampling parameters", before.sampling, {task.id: task.sampling for task in tasks}),
        ("sessions a task", [*map(len, before.rewards.values())], [task.samples for task in tasks]),
    ):
        if left != right:
            raise UsageError(f"the two evaluations of {before.harness} cannot be compared: they differ in {what}{lost}")


def gain(before: Evaluation, after: Evaluation) -> Interval:
    """How much larger the share of solved sessions is after, over the same tasks."""
    return difference(before.solved, after.solved)


def write(folder: Path, found: Mapping[str, Evaluation]) -> None:
    """Write evaluations by harness."""
    (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(found)))


def read(folder: Path) -> dict[str, Evaluation]:
    """What `write` wrote.

    Raises:
        UsageError: there is none in the folder.
    """
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=dict[str, Evaluation])
    except FileNotFoundError:
        raise UsageError(f"{folder} holds no {FILE}: expected the folder of an evaluation (`polar eval … --out`)") from None
    except msgspec.DecodeError as fault:
        raise UsageError(f"{folder / FILE}: {fault}") from None
