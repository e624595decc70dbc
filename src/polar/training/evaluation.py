"""What a policy earns on tasks, by harness, and against what it earned before."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from polar.errors import UsageError
from polar.specs import SamplingSpec, SessionResult, Task
from polar.training.intervals import Interval, difference, mean_over_tasks, pass_at_k

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
    def pass_at_1(self) -> Interval:
        """Mean reward over tasks."""
        return mean_over_tasks([*self.rewards.values()])

    def at_k(self, k: int) -> float:
        return pass_at_k([*self.rewards.values()], k)


def evaluation(harness: str, model: str, tasks: Sequence[Task], results: Sequence[SessionResult]) -> Evaluation:
    """Sum up the sessions of a harness.

    Raises:
        UsageError: no session has a reward.
    """
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


def gain(before: Evaluation, after: Evaluation) -> Interval:
    """How much more was earned after, task by task.

    Raises:
        UsageError: the two are not of the same tasks, sampled alike, with as many sessions each.
    """
    for what, left, right in (
        ("tasks", [*before.rewards], [*after.rewards]),
        ("sampling parameters", before.sampling, after.sampling),
        ("sessions a task", [*map(len, before.rewards.values())], [*map(len, after.rewards.values())]),
    ):
        if left != right:
            raise UsageError(f"the two evaluations of {after.harness} cannot be compared: they differ in {what}")
    return difference([*before.rewards.values()], [*after.rewards.values()])


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
