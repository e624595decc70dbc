"""What a batch proves before it changes weights, and which sessions make one."""

from dataclasses import replace

import numpy as np
import pytest

from polar.errors import CaptureError
from polar.specs import Accounting, Float32Array, Int32Array, SessionResult, Timing
from polar.training.batch import Batch, Tokens
from polar.training.config import AlgorithmSpec
from polar.training.gates import check_delta, check_versions, temperatures
from polar.training.groups import Group, Sample, describe, make_batch
from polar.training.packing import layouts, tokens
from polar.trajectory.chains import Sampling
from polar.trajectory.forest import Forest, join
from tests.training.forests import random_forest

SPEC = AlgorithmSpec()


def batch(sessions: int = 4, version: int = 0) -> tuple[Batch, Tokens]:
    made = Batch(random_forest(3, sessions=sessions), np.ones(sessions), version)
    return made, tokens(made, "session")


def owners(made: Batch) -> Int32Array:
    """The session of each trained token."""
    each: Int32Array = np.repeat(made.forest.sessions, np.diff(made.forest.bounds))
    trained: Int32Array = each[made.forest.loss_mask.astype(bool)]
    return trained


def off(known: Tokens, by: Float32Array) -> Float32Array:
    """The trainer's log-probabilities, so far from the engine's."""
    values: Float32Array = (known.logprobs - by).astype(np.float32)
    return values


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (Sampling(0.7, 1.0, 0, "raw"), "at temperature 0.7, and the engine gave log-probabilities of temperature 1"),
        (Sampling(1.0, 0.9, 0, "processed"), "top_p 0.9"),
        (Sampling(1.0, 1.0, 40, "processed"), "top_k 40"),
        (Sampling(0.0, 1.0, 0, "processed"), "greedy answers"),
    ],
)
def test_sampling_that_cannot_be_reproduced_is_refused(how: Sampling, why: str) -> None:
    with pytest.raises(CaptureError, match=f"L01.*{why}"):
        temperatures(replace(random_forest(0), sampling=(how,)))


def test_logits_are_divided_by_the_temperature_of_processed_ones() -> None:
    forest = replace(random_forest(0), sampling=(Sampling(0.5, 1.0, 0, "processed"),))
    assert set(temperatures(forest).tolist()) == {0.5}
    assert set(temperatures(random_forest(0)).tolist()) == {1.0}


@pytest.mark.parametrize("version", [-1, 4])
def test_tokens_from_nowhere_or_from_the_future_are_refused(version: int) -> None:
    _, known = batch()
    versions = known.versions.copy()
    versions[3] = version
    with pytest.raises(CaptureError, match="W01"):
        check_versions(replace(known, versions=versions), 3)
    check_versions(known, 3)


@pytest.mark.parametrize(("version", "name", "most"), [(0, "delta", 0.05), (1, "delta_stale", 1.0)])
def test_what_is_too_far_off_on_average_is_refused(version: int, name: str, most: float) -> None:
    made, known = batch(version=version)
    near = np.full(len(known.ids), most * 0.9, np.float32)
    assert check_delta(made, known, off(known, near), SPEC)[name] == pytest.approx(most * 0.9, rel=1e-3)
    with pytest.raises(CaptureError, match=rf"L03.*max_{name}"):
        check_delta(made, known, off(known, near * 1.3), SPEC)


@pytest.mark.parametrize("version", [0, 1])
def test_one_poisoned_session_does_not_hide_among_many(version: int) -> None:
    made, known = batch(sessions=200, version=version)
    by = np.where(owners(made) == 77, 11 * (0.05, 1.0)[version], 0.0).astype(np.float32)
    assert by.mean() < 0.05
    with pytest.raises(CaptureError, match="L03.*session session-77"):
        check_delta(made, known, off(known, by), SPEC)


@pytest.mark.parametrize(("count", "times", "refused"), [(8, 11, True), (8, 9, False), (7, 11, False)])
def test_a_session_is_judged_by_the_mean_of_its_tokens_of_that_age(count: int, times: int, refused: bool) -> None:
    made, known = batch(sessions=200, version=1)
    mine = np.flatnonzero(owners(made) == 77)
    assert len(mine) > 2 * 8
    versions = np.ones_like(known.versions)
    versions[mine[count:]] = 0
    by = np.zeros(len(known.ids), np.float32)
    by[mine[:count]] = times * SPEC.max_delta
    known = replace(known, versions=versions)
    if refused:
        with pytest.raises(CaptureError, match="L03.*session session-77"):
            check_delta(made, known, off(known, by), SPEC)
    else:
        assert check_delta(made, known, off(known, by), SPEC)["delta_session"] == pytest.approx(times * SPEC.max_delta, rel=1e-3)


def test_fresh_and_stale_tokens_are_judged_apart() -> None:
    made, known = batch(version=1)
    fresh = owners(made) == 0
    known = replace(known, versions=np.where(fresh, 1, 0).astype(np.int32))
    metrics = check_delta(made, known, off(known, np.where(fresh, 0.01, 0.5).astype(np.float32)), SPEC)
    assert (metrics["delta"], metrics["delta_stale"]) == pytest.approx((0.01, 0.5), rel=1e-3)
    assert (metrics["staleness_max"], metrics["staleness"]) == pytest.approx((1, 1 - fresh.mean()))


@pytest.mark.parametrize("whose", ["trainer", "engine"])
def test_what_is_not_finite_is_refused(whose: str) -> None:
    made, known = batch()
    broken = known.logprobs.copy()
    broken[0] = np.nan
    mine, theirs = (broken, known.logprobs) if whose == "trainer" else (known.logprobs, broken)
    with pytest.raises(CaptureError, match=f"L02: the {whose} gives 1 "):
        check_delta(made, replace(known, logprobs=theirs), mine, SPEC)


def sample(name: str, reward: float | None, seed: int = 0, trained: bool = True) -> Sample:
    forest = replace(random_forest(seed, sessions=1), session_ids=(name,))
    if not trained:
        forest = replace(forest, loss_mask=np.zeros_like(forest.loss_mask))
    accounting = Accounting(20, 15, {"truncated": 5})
    return Sample(SessionResult(name, "t", 0, "completed", reward, 2, 1, accounting, Timing()), forest)


def group(number: int, *rewards: float | None) -> Group:
    return Group(f"task-{number}", number, tuple(sample(f"s{number}{at}", reward, at) for at, reward in enumerate(rewards)))


def test_only_groups_that_teach_are_trained_and_each_group_is_counted_once() -> None:
    groups = [group(0, 1.0, 0.0, None), group(1, 1.0, 1.0), group(2, 0.0, None), group(3, None, None)]
    made = make_batch(groups, SPEC, 5)
    assert made is not None
    assert made.forest.session_ids == ("s00", "s01")
    assert made.advantages == pytest.approx([1, -1], abs=1e-5)
    found = describe(groups, SPEC, made)
    assert [found[f"groups_{fate}"] for fate in ("trained", "uniform", "too_few")] == [1, 1, 2]
    assert make_batch(groups[1:], SPEC, 5) is None
    kept = make_batch(groups, AlgorithmSpec(keep_uniform=True), 5)
    assert kept is not None
    assert kept.advantages.tolist()[2:] == [0, 0]


@pytest.mark.parametrize("least", [0, 1])
def test_a_group_of_none_is_too_few_whatever_is_asked(least: int) -> None:
    groups = [group(0, None), group(1, 1.0, None), group(2, 1.0, 0.0)]
    found = describe(groups, AlgorithmSpec(min_usable=least, keep_uniform=True), None)
    assert [found[f"groups_{fate}"] for fate in ("trained", "uniform", "too_few")] == [2, 0, 1]


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite rewards"):
        make_batch([group(0, float("nan"), 1.0)], SPEC, 0)


def test_a_session_without_trained_tokens_is_not_usable() -> None:
    mixed = Group("t", 0, (sample("a", 1.0), sample("b", 0.0, trained=False)))
    assert [each.result.session_id for each in mixed.usable] == ["a"]


def test_rates_are_those_of_groups_and_shares_those_of_tokens() -> None:
    groups = [group(0, 1.0, 0.0, 0.0, 0.0), group(1, 0.5, 1.0)]
    made = make_batch(groups, SPEC, 0)
    found = describe(groups, SPEC, made)
    assert found["pass@1"] == pytest.approx((0.25 + 0.5) / 2)
    assert found["pass@k"] == 1
    assert found["reward"] == pytest.approx(2.5 / 6)
    assert (found["trained_share"], found["excluded/truncated"]) == (0.75, 0.25)
    assert made is not None
    (whole,) = layouts(made.forest, 1_000_000, "traces")
    assert found["merge_ratio"] == pytest.approx(len(whole.ids) / len(made.forest.ids))
    assert found["merge_ratio"] > 1


def test_advantages_follow_their_sessions_through_the_join() -> None:
    groups = [group(0, 0.0, 1.0), group(1, 1.0, 0.0)]
    made = make_batch(groups, AlgorithmSpec(advantage="mean"), 0)
    assert made is not None
    whole: Forest = join([each.forest for one in groups for each in one.samples])
    assert made.forest.session_ids == whole.session_ids
    assert made.advantages.tolist() == [-0.5, 0.5, 0.5, -0.5]
