"""Intervals hold what they promise, and estimates equal their definitions."""

from itertools import combinations

import numpy as np
import pytest

from polar.training.intervals import difference, mean_over_tasks, pass_at_k


def test_pass_at_k_is_the_share_of_draws_that_hold_a_success() -> None:
    groups = [[1.0, 0, 0, 1, 0], [0.0, 0, 0, 0], [1.0, 1, 1]]
    for k in (1, 2, 3):
        brute = [np.mean([any(draw) for draw in combinations(group, k)]) for group in groups]
        assert pass_at_k(groups, k) == pytest.approx(np.mean(brute))
    with pytest.raises(ValueError, match="no task has 9 sessions"):
        pass_at_k(groups, 9)


def test_one_session_a_task_has_wilsons_interval() -> None:
    found = mean_over_tasks([[1.0]] * 8 + [[0.0]] * 2)
    assert found == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-3)
    assert mean_over_tasks([[0.0]] * 10).high > 0.2, "ten failures do not prove that all fail"


def test_sessions_of_a_task_do_not_pass_for_independent_ones() -> None:
    rng = np.random.default_rng(0)
    alike = [[float(rng.random() < 0.5)] * 8 for _ in range(50)]
    single = [[task[0]] for task in alike]
    width = mean_over_tasks(alike)
    assert width.high - width.low == pytest.approx(mean_over_tasks(single).high - mean_over_tasks(single).low, abs=0.03)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(150):
        skill = rng.beta(1, 2, size=60)
        groups = [(rng.random(4) < task).astype(float).tolist() for task in skill]
        found = mean_over_tasks(groups, trial)
        covered += found.low <= 1 / 3 <= found.high
    assert covered >= 0.89 * 150


def test_a_gain_is_held_task_by_task() -> None:
    rng = np.random.default_rng(2)
    before = [[float(rng.random() < 0.3)] for _ in range(200)]
    after = [[max(each[0], float(rng.random() < 0.4))] for each in before]
    found = difference(before, after)
    assert found.value == pytest.approx(np.mean([a[0] - b[0] for a, b in zip(after, before, strict=True)]))
    assert 0 < found.low < found.value < found.high
    with pytest.raises(ValueError, match="the same tasks"):
        difference(before, after[:-1])
