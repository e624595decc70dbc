"""Forests against the traces of `prefix_merging`: the same sequences, with what they share once."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from polar.errors import CaptureError
from polar.specs import TrainingPolicy, VersionSpan
from polar.tokens.records import Node
from polar.trajectory.builders import Captured, build
from polar.trajectory.export import token_versions
from polar.trajectory.forest import NONE, Forest, forest, join
from tests.tokens.sessions import TOOLS, Conversation, Session, follow, steps, text_message
from tests.trajectory.forests import above, check_shape, leaves, sequences


def random_session(data: st.DataObject, most: int = 10) -> Session:
    session = Session()
    for _ in steps(data, session, most):
        pass
    return session


def talk(word: str = "u") -> Conversation:
    return Conversation([text_message("system", "brief"), text_message("user", word)], TOOLS[1])


def renamed(session: Session, session_id: str) -> Captured:
    calls = [structs.replace(call, session_id=session_id) for call in session.calls]
    return Captured(calls, session.history.tree.nodes, session.messages, session.tools)


def check_sequences(one: Forest, captured: Captured, reward: float | None) -> None:
    """The forest's sequences are the traces, each in its place, to the last number."""
    traces = build(captured, builder="prefix_merging", status="completed", reward=reward).traces
    found = {sequence.trace: sequence for sequence in sequences(one)}
    assert sorted(found) == list(range(len(traces)))
    for index, trace in enumerate(traces):
        sequence, prompt = found[index], len(trace.prompt_ids)
        assert sequence.ids == [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
        assert sequence.mask == [0] * prompt + trace.loss_mask.tolist()
        assert sequence.logprobs == [0.0] * prompt + trace.response_logprobs.tolist()
        assert sequence.versions == [NONE] * prompt + token_versions(trace).tolist()
        assert sequence.weight == pytest.approx(trace.weight)
        assert tuple(call_id for call_id, _ in sequence.answers) == trace.call_ids
    assert int(one.loss_mask.sum()) == sum(int(trace.loss_mask.sum()) for trace in traces), "each trained token once"


@settings(max_examples=50)
@given(st.data())
def test_a_forest_written_out_is_the_traces(data: st.DataObject) -> None:
    session = random_session(data)
    reward = data.draw(st.sampled_from([1.0, None]))
    one = forest(session.captured(), reward=reward)
    check_shape(one)
    check_sequences(one, session.captured(), reward)


@settings(max_examples=30)
@given(st.data())
def test_joined_sessions_say_what_they_said_apart(data: st.DataObject) -> None:
    apart = [renamed(random_session(data, 4), f"s{number}") for number in range(data.draw(st.integers(1, 3)))]
    forests = [forest(captured, reward=float(number)) for number, captured in enumerate(apart)]
    joined = join(forests)
    check_shape(joined)
    together = sorted(sequences(joined), key=lambda one: (one.session_id, one.trace))
    assert together == sorted((one for each in forests for one in sequences(each)), key=lambda one: (one.session_id, one.trace))
    assert joined.session_ids == tuple(name for one in forests for name in one.session_ids)
    assert joined.rewards.tolist() == [reward for one in forests for reward in one.rewards.tolist()]
    again = join([joined])
    assert all(np.array_equal(getattr(again, name), getattr(joined, name), equal_nan=name == "rewards") for name in ARRAYS)
    heads = [node for node in range(len(joined.parents)) if not joined.sampled[above(joined, node)].any()]
    begins = [(int(joined.parents[node]), int(joined.ids[joined.bounds[node]])) for node in heads]
    assert len(set(begins)) == len(begins), "no two contexts in one place begin alike"


ARRAYS = (
    "ids positions loss_mask logprobs policy_versions bounds parents sampled traces weights samplings sessions choices rewards"
).split()


def test_a_group_has_its_system_prompt_once() -> None:
    forests = []
    for number, word in enumerate(("one task", "one more task", "other")):
        session, asking = Session(), talk(word)
        for text in ("a", "b"):
            follow(asking, session.ask(asking, text_message("assistant", text)))
        forests.append(forest(renamed(session, f"s{number}"), reward=1.0))
    joined = join(forests)
    assert int((joined.parents == NONE).sum()) == 1
    assert len(joined.ids) < sum(len(one.ids) for one in forests)
    assert int(joined.loss_mask.sum()) == sum(int(one.loss_mask.sum()) for one in forests)
    assert joined.weights.sum() == pytest.approx(3.0)


def test_equal_answers_of_two_sessions_stay_two() -> None:
    forests = []
    for number in range(2):
        session = Session()
        session.ask(talk(), text_message("assistant", "same"))
        forests.append(forest(renamed(session, f"s{number}"), reward=1.0))
    joined = join(forests)
    assert joined.sampled.tolist() == [0, 1, 1]
    assert joined.sessions.tolist() == [0, 0, 1]


def test_what_leads_to_no_trained_token_is_left_out() -> None:
    session, asking = Session(), talk()
    follow(asking, session.ask(asking, text_message("assistant", "kept")))
    session.ask(asking, text_message("assistant", "cut off"), status="aborted")
    session.ask(talk("aside"), text_message("assistant", "title"), status="aborted")
    one = forest(session.captured(), reward=1.0)
    assert len(one.ids) == session.calls[0].prompt_tokens + session.calls[0].sampled
    assert set(one.call_ids) == {session.calls[0].call_id}
    everything = forest(session.captured(), reward=1.0, policy=TrainingPolicy(aborted="train"))
    assert len(leaves(everything)) == 2
    assert everything.weights.sum() == pytest.approx(1.0)


def test_a_session_without_calls_or_reward() -> None:
    none = forest(Session().captured(), reward=1.0)
    assert (len(none.ids), len(none.parents), none.session_ids, none.bounds.tolist()) == (0, 0, (), [0])
    assert len(join([]).ids) == len(join([none]).ids) == 0
    session = Session()
    session.ask(talk(), text_message("assistant", "a"))
    unscored = forest(session.captured(), reward=None)
    assert math.isnan(unscored.rewards[0])
    assert unscored.weights.sum() == 0


def test_a_forest_refuses_what_a_build_refuses() -> None:
    session = Session()
    call = session.ask(talk(), text_message("assistant", "one"))
    *nodes, last = session.history.tree.nodes
    fields = {name: getattr(last, name) for name in last.__dataclass_fields__}
    cut = Node(**{**fields, "versions": (VersionSpan(0, 1, 1),)})
    with pytest.raises(CaptureError, match="W01"):
        forest(Captured(session.calls, [*nodes, cut], session.messages, session.tools), reward=1.0)
    longer = structs.replace(call, sampled=call.sampled + 1)
    with pytest.raises(CaptureError, match="T08"):
        forest(Captured([longer], session.history.tree.nodes, session.messages, session.tools), reward=1.0)
    with pytest.raises(CaptureError, match="L01"):
        forest(Captured([structs.replace(call, resolved={})], session.history.tree.nodes, {}, {}), reward=1.0)
    with pytest.raises(ValueError, match="finite reward"):
        forest(session.captured(), reward=math.inf)


def test_a_trainer_can_tell_how_each_token_was_sampled() -> None:
    session, asking = Session(), talk()
    follow(asking, session.ask(asking, text_message("assistant", "one")))
    other = session.ask(asking, text_message("assistant", "two"))
    session.calls[1] = structs.replace(other, resolved={"temperature": 1.0, "top_p": 1.0, "top_k": 0.0})
    one = forest(session.captured(), reward=1.0)
    said = [one.sampling[place].temperature for place in one.samplings.tolist() if place != NONE]
    assert said == [0.7, 1.0]
