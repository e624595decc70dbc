"""Why tokens are not trained is said twice, by the builders and by the audit, and both must say the same of any session."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from polar.audit.calls import was_asked
from polar.audit.ground import Ground
from polar.audit.passages import NEVER, Passages
from polar.audit.session import prove_session
from polar.audit.traces import exclusions
from polar.chat import FinishReason, Message, TextPart
from polar.specs import CallKind, Trajectory
from polar.tokens.records import Call, Position
from polar.tokens.tree import TokenTree
from polar.trajectory.builders import Captured, build
from tests.tokens.sessions import Conversation, Session, follow, steps, text_message

OWN = ("message",)  # the sessions below address messages by their JSON, not by its hash


def proven(captured: Captured) -> set[str]:
    """Codes of what an audit finds."""
    return {finding.code for finding in prove_session(captured, None, None).findings} - set(OWN)


def built(captured: Captured) -> Trajectory:
    return build(captured, builder="prefix_merging", status="completed", reward=1.0)


def holds(tree: TokenTree, call: Call, at: Position) -> bool:
    """Whether the ids of `at` on the path to a call's prompt are found by walking all of it."""
    path = [(node.node_id, stop) for node, stop in tree.spans(call.prompt)]
    wanted = [(node.node_id, stop) for node, stop in tree.spans(at)]
    return all(any(node == name and reached >= stop for node, reached in path) for name, stop in wanted)


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    """Any session, and what else can happen to its calls."""
    session = Session()
    for _ in steps(draw(st.data()), session):
        pass
    for number, call in enumerate(session.calls):
        kind: CallKind = draw(st.sampled_from([call.kind, call.kind, "auxiliary"]))
        lost = structs.replace(call, kind=kind, delivered=draw(st.booleans()), constrained=draw(st.booleans()))
        session.calls[number] = draw(st.sampled_from([call, call, lost]))
    return session


@settings(max_examples=80)
@given(sessions())
def test_the_audit_and_the_builders_exclude_the_same_calls_for_the_same_reason(session: Session) -> None:
    captured = session.captured()
    assert proven(captured) == set()
    trained = {call_id for trace in built(captured).traces for call_id in trace.call_ids}
    named = exclusions(captured.calls, Ground(captured.nodes))
    assert trained == {call.call_id for call in captured.calls} - named.keys()


@settings(max_examples=50)
@given(sessions())
def test_one_pass_finds_what_a_walk_of_every_prompt_finds(session: Session) -> None:
    calls, tree = session.calls, session.history.tree
    passages = Passages(calls, Ground(tree.nodes))
    for node in tree.nodes:
        end = tree.end(node.node_id)
        assert passages.last_with(node.node_id) == max((c.ordinal for c in calls if holds(tree, c, end)), default=NEVER)
    for call in calls:
        walked = (other.ordinal for other in calls if other.kind == "agent" and holds(tree, other, call.prompt))
        assert passages.last_beyond(call.prompt, "agent", calls) == max(walked, default=NEVER)


def conversation_with(turns: int, finish: FinishReason = "stop", *, delivered: bool = True, words: int = 0) -> Captured:
    """A session of one conversation; `words` are the ids of each of its messages, 0 for one letter each."""
    session, talk = Session(), Conversation([text_message("user", "u")])
    for turn in range(turns):
        reply = Message("assistant", (TextPart(f"{turn}" + "a" * words),))
        call = session.ask(talk, reply, finish=finish)
        follow(talk, call)
        talk.messages[-1] = text_message("user", f"{turn}" + "u" * words)
        session.calls[-1] = structs.replace(call, delivered=delivered)
    return session.captured()


def test_a_cut_answer_whose_prompt_comes_back_in_other_words_is_superseded() -> None:
    """The harness cuts its text into other parts: its messages are others, the ids are the same."""
    session, talk = Session(), Conversation([text_message("user", "u")])
    cut = session.ask(talk, Message("assistant", (TextPart("a"),)), finish="length")
    talk.messages[0] = structs.replace(talk.messages[0], content=(TextPart("u"), TextPart("")))
    session.ask(talk, Message("assistant", (TextPart("b"),)))
    captured = session.captured()
    assert exclusions(captured.calls, Ground(captured.nodes)) == {cut.call_id: "superseded"}
    assert proven(captured) == set()


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_session_of_200_calls_and_100_000_tokens_is_proven_in_seconds(finish: FinishReason) -> None:
    """Also if no delivery was noted and every answer was cut, so that each call is looked for in every later prompt."""
    captured = conversation_with(200, finish, delivered=False, words=250)
    assert sum(len(node.ids) for node in captured.nodes) > 100_000
    started = time.process_time()
    assert proven(captured) == set()
    assert time.process_time() - started < 5.0


def test_a_call_of_another_model_is_counted_and_stands_nowhere() -> None:
    captured = conversation_with(3)
    asked, answered = captured.calls[1], captured.calls[1].choices[0]
    told = structs.replace(answered, node=None)
    external = structs.replace(
        asked, prompt=Position(), prompt_tokens=70, choices=(told,), sampled=9, untrained="external", parent_call="", resolved={}
    )
    nodes = [node for node in captured.nodes if node.call_id != asked.call_id][: captured.calls[0].prompt.node + 2]
    captured = Captured([captured.calls[0], external], nodes, captured.messages, captured.tools)
    assert built(captured).accounting.excluded == {"external": 9}
    assert proven(captured) == set()
    checked = prove_session(captured, None, None).checked
    assert (checked["prompt_hash"], checked["T08"], checked["T01"]) == (1, 1, 0)
    assert [was_asked(call) for call in captured.calls] == [True, False]


def test_what_is_not_checked_of_a_failed_call_is_not_counted() -> None:
    session, talk = Session(), Conversation([text_message("user", "u")])
    follow(talk, session.ask(talk, text_message("assistant", "a")))
    session.ask(talk, text_message("assistant", "b"), status="failed")
    checked = prove_session(session.captured(), None, None).checked
    assert (checked["prompt_hash"], checked["T08"]) == (2, 1)


@pytest.mark.parametrize("untrained", ["external", "unproven"])
def test_such_a_call_with_tokens_in_the_tree_is_checked_like_any_other(untrained: str) -> None:
    captured = conversation_with(2)
    told = structs.replace(captured.calls[1], untrained=untrained)
    captured = Captured([captured.calls[0], told], captured.nodes, captured.messages, captured.tools)
    assert proven(captured) == set()
    wrong = structs.replace(told, prompt_tokens=1)
    assert proven(Captured([captured.calls[0], wrong], captured.nodes, captured.messages, captured.tools)) == {"prompt_tokens"}


def test_an_answer_of_the_policy_without_tokens_is_found() -> None:
    captured = conversation_with(1)
    (call,) = captured.calls
    lost = structs.replace(call, choices=(structs.replace(call.choices[0], node=None),))
    assert "owner" in proven(Captured([lost], captured.nodes, captured.messages, captured.tools))


def test_a_path_has_the_ids_that_the_tree_says() -> None:
    captured = conversation_with(4)
    ground, tree = Ground(captured.nodes), TokenTree(captured.nodes)
    for call in captured.calls:
        np.testing.assert_array_equal(ground.ids[ground.path(call.prompt)], tree.path(call.prompt))
    assert ground.path(Position()).tolist() == []
