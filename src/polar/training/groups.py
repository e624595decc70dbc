"""Scored sessions of one task, and the batch that some groups of them make."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from polar.specs import Accounting, SessionResult
from polar.training.advantages import advantages
from polar.training.batch import Batch
from polar.training.config import AlgorithmSpec
from polar.training.packing import sequence_tokens
from polar.trajectory.forest import Forest, join


@dataclass(frozen=True)
class Sample:
    """A session that has ended, and what of it can be trained."""

    result: SessionResult
    forest: Forest

    @property
    def usable(self) -> bool:
        """It has a reward, and trained tokens."""
        return self.result.reward is not None and bool(self.forest.loss_mask.any())


@dataclass(frozen=True)
class Group:
    """Sessions of one task, of one visit to it."""

    task_id: str
    number: int
    samples: tuple[Sample, ...]

    @property
    def usable(self) -> tuple[Sample, ...]:
        return tuple(sample for sample in self.samples if sample.usable)

    @property
    def uniform(self) -> bool:
        """All rewards are equal: there is nothing to learn."""
        return len({sample.result.reward for sample in self.usable}) < 2


Fate = Literal["trained", "uniform", "too_few"]


def teaches(group: Group, spec: AlgorithmSpec) -> bool:
    """Whether a group is trained: enough of its sessions are usable, and their rewards differ (dynamic sampling, DAPO)."""
    return _fate(group, spec) == "trained"


def _fate(group: Group, spec: AlgorithmSpec) -> Fate:
    if len(group.usable) < max(spec.min_usable, 1):
        return "too_few"
    return "trained" if spec.keep_uniform or not group.uniform else "uniform"


def make_batch(groups: Sequence[Group], spec: AlgorithmSpec, version: int) -> Batch | None:
    """The batch of those groups that teach something; None where none does. Context that sessions share is there once."""
    chosen = [group.usable for group in groups if teaches(group, spec)]
    if not chosen:
        return None
    worth = [advantages(np.asarray([sample.result.reward for sample in usable], np.float64), spec.advantage) for usable in chosen]
    forest = join([sample.forest for usable in chosen for sample in usable])
    return Batch(forest, np.concatenate(worth), version)


def describe(groups: Sequence[Group], spec: AlgorithmSpec, batch: Batch | None) -> dict[str, float]:
    """Metrics of what was rolled out. `pass@1` is the mean share of solved sessions, `pass@k` the share of
    groups that have one."""
    samples = [sample for group in groups for sample in group.samples]
    scored = [[sample for sample in group.samples if sample.result.reward is not None] for group in groups]
    solved = [[sample.result.solved for sample in group] for group in scored if group]
    rewards = [sample.result.reward or 0.0 for group in scored for sample in group]
    metrics = {
        "sessions": float(len(samples)),
        "sessions_without_reward": float(len(samples) - len(rewards)),
        "groups": float(len(groups)),
        **{f"groups_{fate}": float(sum(_fate(group, spec) == fate for group in groups)) for fate in get_args(Fate)},
        "calls_per_session": _mean([float(sample.result.calls) for sample in samples]),
    }
    if rewards:
        metrics |= {
            "reward": _mean(rewards),
            "pass@1": _mean([_mean([float(each) for each in group]) for group in solved]),
            "pass@k": _mean([float(any(group)) for group in solved]),
        }
    metrics |= _shares(sum((sample.result.accounting for sample in samples), Accounting()))
    if batch is not None:
        metrics["merge_ratio"] = sequence_tokens(batch.forest) / len(batch.forest.ids)
        metrics["advantage_std"] = float(batch.advantages.std())
    return metrics


def _shares(accounting: Accounting) -> dict[str, float]:
    """How many of the sampled tokens are trained, and why others are not."""
    sampled = max(accounting.sampled, 1)
    shares = Counter({f"excluded/{reason}": count / sampled for reason, count in accounting.excluded.items()})
    return {"tokens_sampled": float(accounting.sampled), "trained_share": accounting.trained / sampled, **shares}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
