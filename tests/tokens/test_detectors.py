"""Each detector fires on its fault, by its id, and is silent on good input."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.chat import Usage
from polar.errors import CaptureError
from polar.specs import VersionSpan
from polar.tokens.detectors import LOGPROB_FLOOR, check_bos, check_counts, check_logprobs, check_stop, check_versions

STOP, EOS, BOS = 4, 5, 6


def code(error: pytest.ExceptionInfo[CaptureError]) -> str:
    return error.value.code


@pytest.mark.parametrize("ids", [[], [BOS], [BOS, 1, BOS], [1, BOS, BOS], [1, 1]])
def test_a_prompt_with_one_bos_or_none_passes(ids: list[int]) -> None:
    check_bos(np.asarray(ids, np.int32), BOS)


def test_a_prompt_with_two_bos_is_refused() -> None:
    with pytest.raises(CaptureError, match="BOS, id 6, twice") as refused:
        check_bos(np.asarray([BOS, BOS, 1], np.int32), BOS)
    assert code(refused) == "T05"
    check_bos(np.asarray([BOS, BOS, 1], np.int32), None)


def test_counts_that_agree_pass() -> None:
    check_counts([1, 2], [-1.0, -2.0], 10, Usage(10, 2))


@pytest.mark.parametrize(
    ("ids", "logprobs", "usage", "fault", "says"),
    [
        ([], [], Usage(10, 0), "T15", "without a single token"),
        ([], [], None, "T15", "without a single token"),
        ([1, 2], [-1.0], Usage(10, 2), "T08", "2 sampled ids came with 1 log-probabilities"),
        ([1], [-1.0, -2.0], Usage(10, 1), "T08", "1 sampled ids came with 2 log-probabilities"),
        ([1], [-1.0], None, "T08", "no usage"),
        ([1], [-1.0], Usage(10, 2), "T08", "usage says 2"),
        ([1, 2], [-1.0, -1.0], Usage(10, 1), "T08", "usage says 1"),
        ([1], [-1.0], Usage(11, 1), "T08", "10 prompt ids were sent, the engine's usage says 11"),
    ],
)
def test_counts_that_differ_are_refused(
    ids: list[int], logprobs: list[float], usage: Usage | None, fault: str, says: str
) -> None:
    with pytest.raises(CaptureError, match=says) as refused:
        check_counts(ids, logprobs, 10, usage)
    assert code(refused) == fault


@given(st.lists(st.floats(-999.0, 0.0, width=32), min_size=1))
def test_log_probabilities_pass(values: list[float]) -> None:
    check_logprobs(np.asarray(values, np.float32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e-6, 1.0, -9999.0, LOGPROB_FLOOR, -1e38])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_value_that_is_no_log_probability_is_refused_and_named(bad: float, place: int) -> None:
    values = np.asarray([-1.0, 0.0, -2.0], np.float32)
    values[place] = bad
    with pytest.raises(CaptureError, match=f"of sampled token {place} of 3") as refused:
        check_logprobs(values)
    assert code(refused) == "L02"


@pytest.mark.parametrize(
    ("ids", "finished"), [([1, STOP], True), ([EOS], True), ([1, 2], False), ([1, STOP], False), ([STOP], False)]
)
def test_a_stop_id_at_the_end_and_only_there_passes(ids: list[int], finished: bool) -> None:
    check_stop(ids, finished, (STOP, EOS))


@pytest.mark.parametrize(
    ("ids", "finished", "says"),
    [
        ([1, 2], True, "the last of 2 ids, 2, is no stop id"),
        ([STOP, 2], True, "is no stop id"),
        ([1, STOP, STOP], True, "stands at token 1 of 3"),
        ([STOP, EOS], True, "stands at token 0 of 2"),
        ([1, STOP, 2], False, "stands at token 1 of 3"),
        ([STOP, 2, STOP], False, "stands at token 0 of 3"),
    ],
)
def test_a_doubled_trimmed_or_misplaced_stop_id_is_refused(ids: list[int], finished: bool, says: str) -> None:
    with pytest.raises(CaptureError, match=says) as refused:
        check_stop(ids, finished, (STOP, EOS))
    assert code(refused) == "T06"


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_spans_that_cover_everything_pass_and_neighbours_are_joined(versions: list[int]) -> None:
    given_spans = tuple(VersionSpan(place, place + 1, version) for place, version in enumerate(versions))
    joined = check_versions(given_spans, len(versions))
    assert [span.policy_version for span in joined for _ in range(span.start, span.end)] == versions
    assert all(one.policy_version != other.policy_version for one, other in pairwise(joined))
    assert check_versions(joined, len(versions)) == joined


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([], "end at token 0 of 4"),
        ([(0, 3)], "end at token 3 of 4"),
        ([(0, 5)], "end at token 5 of 4"),
        ([(1, 4)], "token 0 of 4 has no policy version"),
        ([(0, 2), (3, 4)], "token 2 of 4 has no policy version"),
        ([(0, 3), (2, 4)], "token 3 of 4 has no policy version"),
        ([(0, 2), (2, 2), (2, 4)], "token 2 of 4 has no policy version"),
        ([(0, 2), (2, 1), (1, 4)], "token 2 of 4 has no policy version"),
        ([(2, 4), (0, 2)], "token 0 of 4 has no policy version"),
        ([(-1, 4)], "token 0 of 4 has no policy version"),
    ],
)
def test_spans_that_leave_a_token_or_count_one_twice_are_refused(spans: Sequence[tuple[int, int]], says: str) -> None:
    for version in (1, 2):  # of one version, and of two
        given_spans = [VersionSpan(start, end, 1 + place % version) for place, (start, end) in enumerate(spans)]
        with pytest.raises(CaptureError, match=says) as refused:
            check_versions(given_spans, 4)
        assert code(refused) == "W01"
