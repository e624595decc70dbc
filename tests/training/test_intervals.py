"""Intervals hold what they promise, and estimates equal their definitions."""

from itertools import combinations

import numpy as np
import pytest

from polar.training.intervals import Groups, Interval, difference, pass_at_1, pass_at_k

YES, NO = True, False


def width(found: Interval) -> float:
    return found.high - found.low


def drawn(rng: np.random.Generator, skills: np.ndarray[tuple[int, ...], np.dtype[np.float64]], sessions: int) -> Groups:
    return [(rng.random(sessions) < skill).tolist() for skill in skills]


def test_pass_at_k_is_the_share_of_draws_that_hold_a_success() -> None:
    groups = [[YES, NO, NO, YES, NO], [NO] * 4, [YES] * 3]
    for k in (1, 2, 3):
        brute = [np.mean([any(draw) for draw in combinations(group, k)]) for group in groups]
        assert pass_at_k(groups, k) == pytest.approx(np.mean(brute))
    with pytest.raises(ValueError, match="no task has 9 sessions"):
        pass_at_k(groups, 9)


def test_one_session_a_task_has_wilsons_interval() -> None:
    assert pass_at_1([[YES]] * 8 + [[NO]] * 2) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-3)


@pytest.mark.parametrize("sessions", [1, 4])
@pytest.mark.parametrize("solved", [YES, NO])
def test_sessions_that_all_end_alike_prove_no_more_than_their_tasks(solved: bool, sessions: int) -> None:
    found = pass_at_1([[solved] * sessions] * 10)
    assert found.value == solved
    assert width(found) == pytest.approx(0.2775, abs=1e-3), "Wilson's of ten"
    same = difference([[solved] * sessions] * 10, [[solved] * sessions] * 10)
    assert same.value == 0
    assert same.low < -0.2
    assert same.high > 0.2


@pytest.mark.parametrize("groups", [[[YES, NO]] * 4, [[YES, YES], [NO, NO]] * 2, [[YES, NO]], [[YES], [NO]]])
def test_no_interval_is_without_width(groups: Groups) -> None:
    assert width(pass_at_1(groups)) > 0.3
    assert width(difference(groups, groups)) > 0.2


def test_sessions_of_a_task_do_not_pass_for_independent_ones() -> None:
    rng = np.random.default_rng(0)
    single = drawn(rng, np.full(50, 0.5), 1)
    assert pass_at_1([list(task) * 8 for task in single]) == pytest.approx(pass_at_1(single))
    assert width(pass_at_1(drawn(rng, np.full(50, 0.5), 8))) < width(pass_at_1(single)) / 2, "but where they are, they count"


@pytest.mark.parametrize(("tasks", "sessions"), [(20, 4), (60, 4), (60, 1)])
def test_the_intervals_cover_the_truth_as_often_as_they_say(tasks: int, sessions: int) -> None:
    rng = np.random.default_rng(1)
    covered = gained = 0
    for _ in range(300):
        skill = rng.beta(1, 2, size=tasks)
        before, after = drawn(rng, skill, sessions), drawn(rng, skill + 0.2 * (1 - skill), sessions)
        found, more = pass_at_1(before), difference(before, after)
        covered += found.low <= 1 / 3 <= found.high
        gained += more.low <= 0.2 * 2 / 3 <= more.high
    assert covered >= 0.91 * 300
    assert gained >= 0.91 * 300


def test_a_gain_is_held_task_by_task() -> None:
    rng = np.random.default_rng(2)
    before = drawn(rng, np.full(200, 0.3), 1)
    after = [[each[0] or bool(rng.random() < 0.4)] for each in before]
    found = difference(before, after)
    assert found.value == pytest.approx(np.mean([a[0] for a in after]) - np.mean([b[0] for b in before]))
    assert 0 < found.low < found.value < found.high
    shuffled = [before[place] for place in rng.permutation(200)]
    assert width(found) < width(difference(shuffled, after)), "what tasks have in common is no doubt about the gain"
    with pytest.raises(ValueError, match="the same tasks"):
        difference(before, after[:-1])
