"""From messages to prompt ids: random sessions against an oracle of plain lists, and what a reader should know by example."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from polar.chat import Message, TextPart, ToolCall
from polar.specs import Int32Array
from polar.tokens.history import History, prompt_hash
from polar.tokens.lineage import system_text
from polar.tokens.tree import EMPTY
from tests.tokens.sessions import TOOLS, Conversation, Session, follow, rewrite, steps, text_message
from tests.tokens.toy import END, ToyRenderer, left


@settings(max_examples=150)
@given(st.data())
def test_every_prompt_is_what_stored_ids_and_renderer_say(data: st.DataObject) -> None:
    session = Session()
    for number, (asked, call) in enumerate(steps(data, session)):
        answer, plan = session.answers[number], session.plans[number]
        expected, parent = session.expected_prompt(asked, session.answers[:number])
        assert answer.prompt == expected
        assert (plan.continuation.reply.call_id if plan.continuation.reply else "") == parent
        has_past = number > 0 and any(message.role == "assistant" for message in asked.messages)
        assert bool(call.fork_reason) == (not parent and has_past)
        assert (call.prompt_tokens, call.prompt_hash) == (len(expected), prompt_hash(np.asarray(expected, np.int32)))
    tree = session.history.tree
    for call, answer in zip(session.calls, session.answers, strict=True):
        assert tree.path(call.prompt).tolist() == answer.prompt
        for choice in call.choices:
            assert choice.node is not None
            assert tree.path(tree.end(choice.node)).tolist() == answer.prompt + answer.sampled


@settings(max_examples=50)
@given(st.data())
def test_a_restarted_gateway_plans_as_the_first_would_have(data: st.DataObject) -> None:
    session = Session()
    asked = [conversation for conversation, _ in steps(data, session, most=6)]
    restarted = History(ToyRenderer(), session.history.tree.nodes)
    assert restarted.take_unsaved() == []
    for conversation, call in zip(asked, session.calls, strict=True):
        if call.status == "ok":
            restarted.answered(call, system_text(conversation.messages))
    for conversation, call in zip(asked, session.calls, strict=True):
        continued = Conversation(list(conversation.messages), conversation.tools)
        follow(continued, call)
        one, other = (history.plan(continued.messages, continued.tools) for history in (session.history, restarted))
        assert one == other
        assert session.history.render(one).tolist() == restarted.render(other).tolist()


def test_replies_that_the_harness_brings_along_are_examples_and_no_history() -> None:
    session, talk = Session(), start()
    talk.messages[1:1] = [text_message("user", "Say hi."), text_message("assistant", "hi")]
    assert session.ask(talk, text_message("assistant", "ok")).fork_reason == ""


def start() -> Conversation:
    return Conversation([text_message("system", "brief"), text_message("user", "u")], TOOLS[1])


def test_a_prompt_starts_with_what_was_seen_and_said_to_the_token() -> None:
    session, talk = Session(), start()
    for _ in range(5):
        follow(talk, session.ask(talk, text_message("assistant", "日本 ok"), other=True))
    for before, after in zip(session.answers, session.answers[1:], strict=False):
        assert after.prompt[: len(before.prompt) + len(before.sampled)] == before.prompt + before.sampled
    assert sum(len(node.ids) for node in session.history.tree.nodes) == len(
        session.answers[-1].prompt + session.answers[-1].sampled
    )


def test_a_reply_cut_by_length_is_closed_by_the_bridge_and_a_stopped_one_is_not() -> None:
    for finish, closes in (("length", [END]), ("stop", [])):
        session, talk = Session(), start()
        follow(talk, session.ask(talk, text_message("assistant", "ab"), finish=finish))  # type: ignore[arg-type]
        session.ask(talk, text_message("assistant", "c"))
        first, second = session.answers
        known = first.prompt + first.sampled
        assert second.prompt == known + closes + ToyRenderer().bridge(left(True), [text_message("user", "u")]).tolist()


def test_equal_words_in_different_ids_are_ambiguous_and_rendered() -> None:
    session, talk = Session(), start()
    for other in (True, False):
        session.ask(talk, text_message("assistant", "Yes."), other=other)
    talk.messages += [text_message("assistant", "Yes."), text_message("user", "u")]
    call = session.ask(talk, text_message("assistant", "So."))
    assert (call.fork_reason, call.parent_call) == ("ambiguous", "")
    assert session.answers[-1].prompt == ToyRenderer().render(talk.messages, talk.tools).tolist()


def test_a_reply_that_nobody_could_trust_is_never_continued() -> None:
    for status in ("failed", "aborted"):
        session, talk = Session(), start()
        session.ask(talk, text_message("assistant", "Yes."), other=True, status=status)
        talk.messages += [text_message("assistant", "Yes."), text_message("user", "u")]
        assert session.ask(talk, text_message("assistant", "So.")).fork_reason == "history_rewritten"


def test_an_empty_reply_is_a_reply() -> None:
    """T15: one stop id, no word."""
    session, talk = Session(), start()
    follow(talk, session.ask(talk, text_message("assistant", "")))
    call = session.ask(talk, text_message("assistant", "So."))
    assert session.answers[0].sampled == [END]
    assert (call.fork_reason, call.parent_call) == ("", session.calls[0].call_id)


def test_a_history_that_ends_with_a_reply_is_continued_by_an_empty_bridge() -> None:
    """T18."""
    session, talk = Session(), start()
    talk.messages.append(session.ask(talk, text_message("assistant", "Yes.")).choices[0].message)
    call = session.ask(talk, text_message("assistant", "So."))
    assert call.parent_call == session.calls[0].call_id
    assert (
        session.answers[1].prompt
        == session.answers[0].prompt + session.answers[0].sampled + ToyRenderer().bridge(left(True), ()).tolist()
    )


def test_a_fork_names_the_call_that_it_left_and_shares_what_agrees() -> None:
    session, talk = Session(), start()
    reply = Message("assistant", (TextPart("Yes."),), "", (ToolCall("", "bash", "{}"),))
    follow(talk, session.ask(talk, reply))
    talk.messages[2] = rewrite(talk.messages[2])
    call = session.ask(talk, text_message("assistant", "So."))
    assert (call.fork_reason, call.parent_call) == ("history_rewritten", session.calls[0].call_id)
    branch = next(node for node in session.history.tree.nodes if node.kind == "context" and node.call_id == call.call_id)
    assert session.history.tree.nodes[branch.parent.node].call_id == session.calls[0].call_id
    assert branch.parent.offset == len("Yes.")


@pytest.mark.parametrize("first_fails_first", [True, False])
def test_what_failed_commits_held_goes_with_the_next(first_fails_first: bool) -> None:
    session, talk = Session(), start()
    taken = []
    for text in "ab":
        session.ask(talk, text_message("assistant", text))
        taken.append(session.history.take_unsaved())
    for nodes in taken if first_fails_first else reversed(taken):
        session.history.give_back(nodes)
    assert session.history.take_unsaved() == [*taken[0], *taken[1]]
    assert session.history.take_unsaved() == []
    session.history.give_back(())
    assert session.history.take_unsaved() == []


@pytest.mark.parametrize(("message", "letters"), [(text_message("user", "日本"), 2), (Message("user"), 0)])
def test_the_size_of_a_plan_counts_the_letters_to_encode(message: Message, letters: int) -> None:
    plan = History(ToyRenderer()).plan([message], ())
    assert (plan.size, plan.start) == (letters, EMPTY)


def whole(session: Session, talk: Conversation) -> Int32Array:
    """The next prompt as an engine would render it that knows what is stored."""
    plan = session.history.plan(talk.messages, talk.tools)
    return np.concatenate([session.history.tree.path(plan.start), session.history.render(plan)])


def test_a_prompt_of_the_engines_is_put_behind_the_reply_that_it_continues() -> None:
    """Of two equal replies it is the one that lineage names, though the older has the same ids."""
    session, talk = Session(), start()
    for _ in range(2):
        asked = start()
        reply = Message("assistant", (TextPart("Yes."),), "", (ToolCall("", "bash", "{}"),))
        follow(asked, session.ask(asked, reply))
        talk = asked
    ids, plan = whole(session, talk), session.history.plan(talk.messages, talk.tools)
    place, differs = session.history.place_whole(plan, ids, "c9abcdefgh")
    assert differs is None
    assert session.history.tree.path(place).tolist() == ids.tolist()
    assert [told.reply.call_id for told in session.history.told(place)] == [session.calls[1].call_id]


def test_a_prompt_of_the_engines_that_leaves_what_is_stored_forks_at_the_token() -> None:
    session, talk = Session(), start()
    follow(talk, session.ask(talk, text_message("assistant", "Yes."), other=True))
    plan = session.history.plan(talk.messages, talk.tools)
    ids = ToyRenderer().render(talk.messages, talk.tools)
    place, differs = session.history.place_whole(plan, ids, "c9abcdefgh")
    assert differs == len(session.answers[0].prompt)
    assert session.history.tree.path(place).tolist() == ids.tolist()
    assert session.history.told(place) == []
    (told,) = session.history.told(plan.start)
    stored = session.history.tree.path(plan.start)
    assert stored[told.start : told.end].tolist() == session.answers[0].sampled


def test_a_reply_whose_ids_nobody_has_is_history_and_no_place() -> None:
    session, talk = Session(), start()
    record = session.ask(talk, text_message("assistant", "Yes."))
    untraced = structs.replace(
        record, call_id="c8abcdefgh", choices=tuple(structs.replace(choice, node=None) for choice in record.choices)
    )
    history = History(ToyRenderer())
    plan = history.plan(talk.messages, talk.tools, traced=False)
    history.answered(untraced, plan.system)
    follow(talk, record)
    seen, traced = (history.plan(talk.messages, talk.tools, traced=traced) for traced in (False, True))
    assert (seen.parent_call, seen.continuation.fork_reason) == ("c8abcdefgh", "")
    assert (traced.parent_call, traced.continuation.fork_reason) == ("c8abcdefgh", "external_history")
    assert history.render(traced).tolist() == ToyRenderer().render(talk.messages, talk.tools).tolist()
