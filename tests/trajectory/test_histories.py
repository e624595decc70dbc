"""Builders and forests against the slow oracle: random histories whose calls go on, leave, repeat and outrun each other."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.specs import BuilderName, Trace, TrainingPolicy, Trajectory
from polar.trajectory.builders import Captured, build
from polar.trajectory.export import token_versions
from polar.trajectory.forest import forest
from tests.trajectory.forests import check_shape, sequences
from tests.trajectory.oracle import Asked, Expected, captured, policies, reasons, sessions, traces

BUILDERS: tuple[BuilderName, ...] = ("per_request", "prefix_merging")


def built(session: Captured, builder: BuilderName, policy: TrainingPolicy, reward: float | None = 1.0) -> Trajectory:
    return build(session, builder=builder, status="completed", reward=reward, policy=policy)


def lists(trace: Trace) -> Expected:
    """A trace in the oracle's words."""
    prompt = len(trace.prompt_ids)
    return Expected(
        [int(call_id[1:]) for call_id in trace.call_ids],
        prompt,
        [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()],
        [0] * prompt + trace.loss_mask.tolist(),
        [0.0] * prompt + trace.response_logprobs.tolist(),
        [-1] * prompt + token_versions(trace).tolist(),
        trace.branch.parent_trace,
    )


@st.composite
def orders(draw: st.DrawFn, calls: Sequence[Asked]) -> list[int]:
    """An order in which the calls could have come: each after those of whose answers it holds tokens."""
    order: list[int] = []
    while len(order) < len(calls):
        ready = [asked.ordinal for asked in calls if asked.ordinal not in order and set(asked.needs) <= set(order)]
        order.append(draw(st.sampled_from(ready)))
    return order


@settings(max_examples=60)
@given(sessions(), policies)
def test_traces_are_what_lists_say(calls: list[Asked], policy: TrainingPolicy) -> None:
    session = captured(calls, range(len(calls)))
    for builder in BUILDERS:
        found = built(session, builder, policy).traces
        assert [lists(trace) for trace in found] == traces(calls, policy, merged=builder == "prefix_merging")


@settings(max_examples=40)
@given(sessions(), policies, st.sampled_from([1.0, 0.0, None]))
def test_every_sampled_token_is_trained_once_or_counted_by_name(
    calls: list[Asked], policy: TrainingPolicy, reward: float | None
) -> None:
    out = reasons(calls, policy)
    session = captured(calls, range(len(calls)))
    counts: Counter[str] = Counter()
    for asked in calls:
        kept = asked.sampled - asked.tail
        counts[out.get(asked.ordinal, "trained" if reward is not None else "no_reward")] += kept
        counts[out.get(asked.ordinal, "stop_tail")] += asked.tail
    for builder in BUILDERS:
        trajectory = built(session, builder, policy, reward)
        told = Counter(trajectory.accounting.excluded) + Counter(trained=trajectory.accounting.trained)
        assert told == +counts
        assert trajectory.accounting.sampled == sum(asked.sampled for asked in calls)
        once = Counter(token for trace in trajectory.traces for token in trace.response_ids[trace.loss_mask == 1].tolist())
        trained = [told.ids for asked in calls if asked.ordinal not in out for told in asked.answers]
        assert once == Counter(token for ids in trained for token in ids)
        weights = sum(trace.weight for trace in trajectory.traces)
        assert weights == pytest.approx(1.0 if trained and reward is not None else 0.0), "whatever is trained (W04)"


@settings(max_examples=40)
@given(sessions(), policies)
def test_forests_written_out_are_the_traces(calls: list[Asked], policy: TrainingPolicy) -> None:
    one = forest(captured(calls, range(len(calls))), reward=1.0, policy=policy)
    check_shape(one)
    assert len(set(one.ids.tolist())) == len(one.ids), "every token once"
    found = sorted(sequences(one), key=lambda sequence: sequence.trace)
    expected = traces(calls, policy, merged=True)
    assert [(told.ids, told.mask, told.logprobs, told.versions) for told in found] == [
        (told.ids, told.mask, told.logprobs, told.versions) for told in expected
    ]


@settings(max_examples=40)
@given(st.data(), sessions(), policies)
def test_the_order_of_arrival_changes_nothing(data: st.DataObject, calls: list[Asked], policy: TrainingPolicy) -> None:
    first = captured(calls, range(len(calls)))
    whole = data.draw(st.lists(st.booleans(), min_size=len(calls), max_size=len(calls)))
    second = captured(calls, data.draw(orders(calls)), whole)
    assert sum(len(node.ids) for node in second.nodes) == sum(len(node.ids) for node in first.nodes)
    for builder in BUILDERS:
        one, other = built(first, builder, policy), built(second, builder, policy)
        assert [lists(trace) for trace in other.traces] == [lists(trace) for trace in one.traces]
        assert other.accounting == one.accounting
    forests = [forest(session, reward=1.0, policy=policy) for session in (first, second)]
    one_forest, other_forest = ([told.__dict__ for told in sorted(sequences(f), key=lambda told: told.trace)] for f in forests)
    assert one_forest == other_forest
    assert np.sort(forests[0].ids).tolist() == np.sort(forests[1].ids).tolist()
