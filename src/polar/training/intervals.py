"""How sure a pass rate is. Sessions of one task are alike, so tasks are drawn, not sessions."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

DRAWS = 10_000
Groups = Sequence[Sequence[float]]  # for each task, the rewards of its sessions


class Interval(NamedTuple):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


def mean_over_tasks(groups: Groups, seed: int = 0) -> Interval:
    """Mean of the tasks' mean rewards, with a percentile bootstrap over tasks (Efron 1979).

    With one session a task, and rewards 0 or 1, the interval is Wilson's (1927), which holds near 0 and 1 too.

    Raises:
        ValueError: there are no sessions.
    """
    means = np.asarray([np.mean(group) for group in groups if len(group)], np.float64)
    if len(means) == 0:
        raise ValueError("expected at least one session with a reward")
    if all(len(group) <= 1 for group in groups) and set(means.tolist()) <= {0.0, 1.0}:
        return _wilson(int(means.sum()), len(means))
    return _bootstrap(means, seed)


def difference(before: Groups, after: Groups, seed: int = 0) -> Interval:
    """Mean over tasks of how much more a task's sessions earned after than before, with a bootstrap over tasks.

    Raises:
        ValueError: the two do not have the same tasks, or a task has no session in one of them.
    """
    if len(before) != len(after) or not all(len(left) and len(right) for left, right in zip(before, after, strict=True)):
        raise ValueError("expected sessions of the same tasks before and after")
    gains = np.asarray([np.mean(right) - np.mean(left) for left, right in zip(before, after, strict=True)], np.float64)
    return _bootstrap(gains, seed)


def pass_at_k(groups: Groups, k: int) -> float:
    """The chance that at least one of k sessions of a task solves it: 1 - C(n - c, k) / C(n, k), over tasks with n ≥ k sessions
    of which c did (the unbiased estimator of Chen et al. 2021, arXiv 2107.03374). A session solves with a reward of at least 1.

    Raises:
        ValueError: no task has k sessions.
    """
    chances = []
    for group in groups:
        sessions, solved = len(group), sum(reward >= 1 for reward in group)
        if sessions >= k:
            chances.append(1 - math.comb(sessions - solved, k) / math.comb(sessions, k))
    if not chances:
        raise ValueError(f"no task has {k} sessions")
    return sum(chances) / len(chances)


def _wilson(solved: int, sessions: int) -> Interval:
    z = 1.959964
    share = solved / sessions
    centre = (share + z * z / (2 * sessions)) / (1 + z * z / sessions)
    half = z * math.sqrt(share * (1 - share) / sessions + z * z / (4 * sessions * sessions)) / (1 + z * z / sessions)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def _bootstrap(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]], seed: int) -> Interval:
    rng = np.random.default_rng(seed)
    draws = np.concatenate([values[rng.integers(0, len(values), (100, len(values)))].mean(1) for _ in range(DRAWS // 100)])
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high))
