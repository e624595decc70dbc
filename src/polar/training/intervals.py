"""How sure a pass rate is. Sessions of one task are alike, so tasks are drawn, not sessions."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polar.training.batch import Float64Array

Z = 1.959964  # two-sided, 95 %
Groups = Sequence[Sequence[bool]]  # for each task, which of its sessions solved it


class Interval(NamedTuple):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at_1(groups: Groups) -> Interval:
    """Mean over tasks of the share of sessions that solve a task, with Wilson's interval (1927) for clustered samples.

    Wilson's n is the effective number of sessions, p(1 - p) / Var(mean of the tasks' shares), as Franco et al. (J. Survey Stat.
    Methodol. 7, 2019) found it to hold also for few clusters and near 0 and 1. It is at least the number of tasks, which it is
    too where nothing shows how alike a task's sessions are, and at most that of sessions.

    Raises:
        ValueError: there are no sessions.
    """
    known = [group for group in groups if len(group)]
    if not known:
        raise ValueError("expected at least one session with a reward")
    shares = _shares(known)
    value = float(shares.mean())
    spread = value * (1 - value)
    tasks, sessions = len(shares), _sessions(known)
    if tasks == 1 or spread == 0:
        return _wilson(value, tasks)
    variance = float(shares.var(ddof=1)) / tasks
    return _wilson(value, min(sessions, max(tasks, spread / variance)) if variance else sessions)


def difference(before: Groups, after: Groups) -> Interval:
    """How much larger `pass_at_1` is after than before, on the same tasks.

    Newcombe's hybrid of the two intervals for paired proportions (Stat. Med. 17, 1998, method 10), by the correlation between
    the tasks' shares, with his correction for continuity where it is positive.

    Raises:
        ValueError: the two do not have the same tasks, or a task has no session in one of them.
    """
    if len(before) != len(after) or not all(len(left) and len(right) for left, right in zip(before, after, strict=True)):
        raise ValueError("expected sessions of the same tasks before and after")
    old, new = pass_at_1(before), pass_at_1(after)
    alike = _correlation(_shares(before), _shares(after), min(_sessions(before), _sessions(after)))
    gained = new.value - old.value
    below = _hybrid(new.value - new.low, old.high - old.value, alike)
    above = _hybrid(new.high - new.value, old.value - old.low, alike)
    return Interval(gained, gained - below, gained + above)


def pass_at_k(groups: Groups, k: int) -> float:
    """The chance that at least one of k sessions of a task solves it: 1 - C(n - c, k) / C(n, k), over tasks with n ≥ k sessions
    of which c did (the unbiased estimator of Chen et al. 2021, arXiv 2107.03374).

    Raises:
        ValueError: no task has k sessions.
    """
    chances = []
    for group in groups:
        sessions, solved = len(group), sum(group)
        if sessions >= k:
            chances.append(1 - math.comb(sessions - solved, k) / math.comb(sessions, k))
    if not chances:
        raise ValueError(f"no task has {k} sessions")
    return sum(chances) / len(chances)


def _shares(groups: Groups) -> Float64Array:
    return np.asarray([np.mean(group) for group in groups], np.float64)


def _sessions(groups: Groups) -> int:
    return sum(map(len, groups))


def _wilson(share: float, sessions: float) -> Interval:
    centre = (share + Z * Z / (2 * sessions)) / (1 + Z * Z / sessions)
    half = Z * math.sqrt(share * (1 - share) / sessions + Z * Z / (4 * sessions * sessions)) / (1 + Z * Z / sessions)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def _hybrid(of_new: float, of_old: float, alike: float) -> float:
    return math.sqrt(of_new**2 - 2 * alike * of_new * of_old + of_old**2)


def _correlation(left: Float64Array, right: Float64Array, sessions: int) -> float:
    """Correlation of the tasks' shares; 0 where those of one side are all equal."""
    spread = float(left.std() * right.std())
    if spread == 0:
        return 0.0
    shared = float(np.mean((left - left.mean()) * (right - right.mean())))
    return (max(0.0, shared - 1 / (2 * sessions)) if shared > 0 else shared) / spread
