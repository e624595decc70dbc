"""Builders against a recount by hand: from nodes, calls, and what each call saw and said as plain lists."""

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from polar.chat import FinishReason
from polar.errors import CaptureError
from polar.specs import BuilderName, CallKind, Finding, Trace, Trajectory, VersionSpan
from polar.tokens.records import Call, CallStatus, Node, Position
from polar.trajectory.builders import build
from tests.tokens.sessions import TOOLS, Answer, Conversation, Session, follow, steps, text_message

BUILDERS: tuple[BuilderName, ...] = ("per_request", "prefix_merging")


def built(session: Session, builder: BuilderName = "prefix_merging", reward: float | None = 1.0) -> Trajectory:
    return build(session.captured(), builder=builder, status="completed", reward=reward)


# The recount


def above(session: Session, at: Position) -> Iterator[tuple[Node, int]]:
    """Nodes from `at` up to the root, each with how many of its tokens are on the way."""
    while at.node >= 0:
        node = session.history.tree.nodes[at.node]
        yield node, at.offset
        at = node.parent


def holds(session: Session, call: Call, at: Position) -> bool:
    """Whether the way to `at` has all of the call's answer."""
    return any(node.call_id == call.call_id and node.kind == "sampled" and n == len(node.ids) for node, n in above(session, at))


def goes_through(session: Session, place: Position, at: Position) -> bool:
    return any(node.node_id == place.node and n >= place.offset for node, n in above(session, at))


def reasons(session: Session) -> dict[str, str]:
    """Why each untrained call is not trained."""
    found: dict[str, str] = {}
    for call in session.calls:
        later = [other for other in session.calls if other.ordinal > call.ordinal]
        cut = bool(call.choices) and call.choices[0].finish_reason == "length"
        asked_again = any(
            other.kind == call.kind
            and (
                goes_through(session, call.prompt, other.prompt)
                or other.message_hashes[: len(call.message_hashes)] == call.message_hashes
            )
            for other in later
        )
        dropped = cut and asked_again and not any(holds(session, call, other.prompt) for other in later)
        if call.status == "failed":
            found[call.call_id] = "untrusted"
        elif dropped or any(other.replaces == call.call_id for other in session.calls):
            found[call.call_id] = "superseded"
        elif call.status == "aborted":
            found[call.call_id] = "aborted"
        elif call.kind == "auxiliary":
            found[call.call_id] = "auxiliary"
    return found


def parent_of(session: Session, call: Call, trained: Mapping[str, Answer]) -> tuple[str, bool]:
    """The nearest trained call on the way to this one's prompt, and whether all of its answer is on the way."""
    for node, n in above(session, call.prompt):
        if node.kind == "sampled" and node.call_id in trained:
            return node.call_id, n == len(node.ids)
    return "", False


def check_tokens(session: Session, trace: Trace, trained: Mapping[str, Answer]) -> None:
    """Every number of a trace against what its calls saw and said."""
    whole = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
    last = trained[trace.call_ids[-1]]
    mask, logprobs = [0] * len(whole), np.zeros(len(whole), np.float32)
    versions: list[int] = []
    for call_id in trace.call_ids:
        answer = trained[call_id]
        start, end = len(answer.prompt), len(answer.prompt) + len(answer.sampled)
        assert whole[:end] == answer.prompt + answer.sampled
        mask[start:end] = [1] * len(answer.sampled)
        logprobs[start:end] = answer.logprobs
        versions += answer.versions
    assert whole == last.prompt + last.sampled
    assert trace.prompt_ids.tolist() == trained[trace.call_ids[0]].prompt
    assert trace.loss_mask.tolist() == mask[len(trace.prompt_ids) :]
    assert trace.response_logprobs.tobytes() == logprobs[len(trace.prompt_ids) :].tobytes()
    assert [span.policy_version for span in trace.policy_versions for _ in range(span.start, span.end)] == versions
    assert [span.start for span in trace.policy_versions] == [0, *(span.end for span in trace.policy_versions[:-1])]
    neighbours = zip(trace.policy_versions, trace.policy_versions[1:], strict=False)
    assert all(one.policy_version != other.policy_version for one, other in neighbours)
    arrays = (trace.prompt_ids, trace.response_ids, trace.loss_mask, trace.response_logprobs)
    assert [str(array.dtype) for array in arrays] == ["int32", "int32", "uint8", "float32"]


def check_messages(session: Session, trace: Trace) -> None:
    by_id = {call.call_id: call for call in session.calls}
    first, last = by_id[trace.call_ids[0]], by_id[trace.call_ids[-1]]
    assert trace.prompt_messages == tuple(session.messages[digest] for digest in first.message_hashes)
    assert trace.response_messages[-1] == last.choices[0].message
    assert trace.finish_reason == last.choices[0].finish_reason
    assert trace.tools == session.tools[first.tools_hash]
    assert trace.branch.kind == first.kind


def check(session: Session, builder: BuilderName) -> None:
    trajectory = built(session, builder)
    traces = trajectory.traces
    excluded = reasons(session)
    trained = {answer.call_id: answer for answer in session.answers if answer.call_id not in excluded}
    home = {call_id: index for index, trace in enumerate(traces) for call_id in trace.call_ids}
    assert sorted(call_id for trace in traces for call_id in trace.call_ids) == sorted(trained)
    for trace in traces:
        check_tokens(session, trace, trained)
        check_messages(session, trace)
    counts: dict[str, int] = {}
    for answer in session.answers:
        if answer.call_id in excluded:
            counts[excluded[answer.call_id]] = counts.get(excluded[answer.call_id], 0) + len(answer.sampled)
    total = sum(len(answer.sampled) for answer in trained.values())
    assert trajectory.accounting.excluded == counts
    assert trajectory.accounting.trained == total == sum(int(trace.loss_mask.sum()) for trace in traces)
    assert trajectory.accounting.sampled == total + sum(counts.values())
    assert sum(trace.weight for trace in traces) == pytest.approx(1.0 if traces else 0.0)
    assert all(trace.weight == int(trace.loss_mask.sum()) / total for trace in traces)
    check_chains(session, builder, trajectory, trained, home)


def check_chains(
    session: Session, builder: BuilderName, trajectory: Trajectory, trained: Mapping[str, Answer], home: Mapping[str, int]
) -> None:
    """Where traces begin, and that nothing which could follow was left apart."""
    calls = {call.call_id: call for call in session.calls}
    followed: dict[str, list[str]] = {}
    for trace in trajectory.traces:
        parent, _ = parent_of(session, calls[trace.call_ids[0]], trained)
        assert trace.branch.parent_trace == (home[parent] if parent else None)
        for one, other in zip(trace.call_ids, trace.call_ids[1:], strict=False):
            assert parent_of(session, calls[other], trained) == (one, True)
            followed[one] = [other]
    clean = {parent for call_id in trained for parent, whole in [parent_of(session, calls[call_id], trained)] if whole}
    assert set(followed) == (clean if builder == "prefix_merging" else set())
    firsts = [calls[trace.call_ids[0]].ordinal for trace in trajectory.traces]
    assert firsts == sorted(firsts)


@settings(max_examples=120)
@given(st.data())
def test_random_sessions_are_built_as_a_recount_says(data: st.DataObject) -> None:
    session = Session()
    for _ in steps(data, session):
        pass
    session.calls = [
        structs.replace(call, kind=data.draw(st.sampled_from([call.kind, call.kind, "auxiliary"]))) for call in session.calls
    ]
    for builder in BUILDERS:
        check(session, builder)


@settings(max_examples=40)
@given(st.data())
def test_without_a_reward_nothing_is_trained_and_all_is_counted(data: st.DataObject) -> None:
    session = Session()
    for _ in steps(data, session, most=5):
        pass
    for builder in BUILDERS:
        with_reward, without = built(session, builder).accounting, built(session, builder, None)
        assert without.accounting.trained == 0
        assert without.accounting.excluded.get("no_reward", 0) == with_reward.trained
        assert without.accounting.sampled == with_reward.sampled
        assert all((trace.reward, trace.weight) == (None, 0.0) for trace in without.traces)


# Examples


def start(kind: CallKind = "agent", word: str = "u") -> Conversation:
    return Conversation([text_message("system", "brief"), text_message("user", word)], TOOLS[1], kind)


def say(
    session: Session, talk: Conversation, text: str, finish: FinishReason = "stop", status: CallStatus = "ok", replaces: str = ""
) -> Call:
    call = session.ask(talk, text_message("assistant", text), finish=finish, status=status, replaces=replaces)
    follow(talk, call)
    return call


def test_a_conversation_is_one_trace_or_one_for_each_request() -> None:
    session, talk = Session(), start()
    calls = [say(session, talk, text).call_id for text in ("one", "two", "three")]
    (merged,) = built(session).traces
    assert merged.call_ids == tuple(calls)
    apart = built(session, "per_request").traces
    assert [trace.call_ids for trace in apart] == [(call_id,) for call_id in calls]
    assert [trace.branch.parent_trace for trace in apart] == [None, 0, 1]


def test_no_calls_are_no_traces() -> None:
    for builder in BUILDERS:
        trajectory = built(Session(), builder)
        assert (trajectory.traces, trajectory.accounting.sampled, trajectory.accounting.holds) == ((), 0, True)


def test_the_longer_branch_goes_on_and_the_other_names_it() -> None:
    session, talk = Session(), start()
    first = say(session, talk, "one")
    side = Conversation(list(talk.messages), talk.tools, "subagent")
    aside = say(session, side, "aside")
    second, third = say(session, talk, "two"), say(session, talk, "three")
    main, branch = built(session).traces
    assert main.call_ids == (first.call_id, second.call_id, third.call_id)
    assert branch.call_ids == (aside.call_id,)
    assert (branch.branch.kind, branch.branch.parent_trace) == ("subagent", 0)


def test_a_fork_in_the_middle_of_a_reply_is_context_and_the_reply_stays_trained() -> None:
    session, talk = Session(), start()
    say(session, talk, "one two")
    talk.messages[2] = text_message("assistant", "one TWO")
    say(session, talk, "three")
    old, fork = built(session).traces
    assert old.loss_mask.sum() == len("one two") + 1
    assert fork.loss_mask.sum() == len("three") + 1
    assert fork.branch.parent_trace == 0


def test_a_reply_cut_by_length_and_asked_again_is_superseded() -> None:
    """C05, once with the very request, once with a word that a harness adds."""
    for nudge in ([], [text_message("user", "Shorter.")]):
        session, talk = Session(), start()
        say(session, talk, "before")
        cut = session.ask(talk, text_message("assistant", "endless"), finish="length")
        talk.messages += nudge
        say(session, talk, "short")
        trajectory = built(session)
        assert trajectory.accounting.excluded == {"superseded": cut.sampled}
        assert [len(trace.call_ids) for trace in trajectory.traces] == [2]


def test_a_reply_cut_by_length_that_is_continued_is_trained() -> None:
    session, talk = Session(), start()
    say(session, talk, "endless", finish="length")
    say(session, talk, "more")
    assert built(session).accounting.excluded == {}


def test_a_reply_cut_by_length_at_the_end_is_trained() -> None:
    session, talk = Session(), start()
    say(session, talk, "endless", finish="length")
    (trace,) = built(session).traces
    assert trace.finish_reason == "length"


def test_a_sub_agent_cut_by_length_is_not_superseded_by_the_others() -> None:
    session, talk, other = Session(), start(), start("subagent", "other task")
    say(session, talk, "one")
    say(session, other, "endless", finish="length")
    say(session, start("subagent", "third task"), "fine")
    say(session, talk, "two")
    assert built(session).accounting.excluded == {}
    assert len(built(session).traces) == 3


def test_a_finished_reply_that_is_asked_again_is_another_sample() -> None:
    session, talk = Session(), start()
    session.ask(talk, text_message("assistant", "one"))
    say(session, talk, "two")
    assert [trace.weight for trace in built(session).traces] == [0.5, 0.5]


def test_untrusted_aborted_superseded_and_auxiliary_tokens_are_counted_by_name() -> None:
    session, talk = Session(), start()
    failed = say(session, talk, "failed", status="failed")
    first, second = (say(session, talk, "aborted" * n, status="aborted") for n in (1, 2))
    say(session, talk, "fine", replaces=second.call_id)
    title = say(session, start("auxiliary"), "title")
    assert built(session).accounting.excluded == {
        "untrusted": failed.sampled,
        "aborted": first.sampled,
        "superseded": second.sampled,
        "auxiliary": title.sampled,
    }
    assert [len(trace.call_ids) for trace in built(session).traces] == [1]


def test_an_untrained_reply_in_the_history_is_context() -> None:
    """What is left out of the loss stays in the sequence, and the trace goes on behind it."""
    session, talk = Session(), start()
    first, second, third = (say(session, talk, text) for text in ("one", "two", "three"))
    session.calls[1] = structs.replace(second, kind="auxiliary")
    (trace,) = built(session).traces
    assert trace.call_ids == (first.call_id, third.call_id)
    assert len(trace.prompt_ids) + len(trace.response_ids) == third.prompt_tokens + third.sampled


def test_versions_are_joined_over_replies_and_cut_where_weights_changed() -> None:
    session, talk = Session(), start()
    for versions in ((1, 1, 2), (2,), (3,)):
        follow(talk, session.ask(talk, text_message("assistant", "abcd"), versions=versions))
    (trace,) = built(session).traces
    assert trace.policy_versions == (VersionSpan(0, 2, 1), VersionSpan(2, 10, 2), VersionSpan(10, 15, 3))


def test_a_trace_says_how_its_tokens_were_sampled() -> None:
    session, talk = Session(), start()
    say(session, talk, "one")
    say(session, talk, "two")
    (trace,) = built(session).traces
    assert (trace.temperature, trace.top_p, trace.top_k, trace.logprobs_mode) == (0.7, 0.9, 20, "raw")
    assert len({call.resolved["max_tokens"] for call in session.calls}) == 2, "max_tokens is each call's own"


OTHERWISE: list[dict[str, object]] = [
    {"resolved": {"temperature": 1.0, "top_p": 0.9, "top_k": 20.0}},
    {"resolved": {"temperature": 0.7, "top_p": 1.0, "top_k": 20.0}},
    {"resolved": {"temperature": 0.7, "top_p": 0.9, "top_k": 0.0}},
    {"logprobs_mode": "processed"},
]


@pytest.mark.parametrize("otherwise", OTHERWISE)
def test_calls_of_one_trace_that_were_sampled_differently_stop_the_build(otherwise: dict[str, object]) -> None:
    session, talk = Session(), start()
    say(session, talk, "one")
    second = say(session, talk, "two")
    session.calls[1] = structs.replace(second, **otherwise)
    with pytest.raises(CaptureError, match=r"^L01: of one trace, call c0abcdefgh .* c1abcdefgh"):
        built(session)
    assert len(built(session, "per_request").traces) == 2


def test_a_call_that_does_not_say_how_it_was_sampled_stops_the_build() -> None:
    session, talk = Session(), start()
    call = say(session, talk, "one")
    session.calls[0] = structs.replace(call, resolved={"temperature": 1.0, "top_k": 0.0})
    with pytest.raises(CaptureError, match="L01: call c0abcdefgh does not say with which top_p"):
        built(session)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_stops_the_build(reward: float) -> None:
    with pytest.raises(ValueError, match="finite reward"):
        built(Session(), reward=reward)


def test_a_reward_of_zero_is_a_reward() -> None:
    session = Session()
    say(session, start(), "one")
    (trace,) = built(session, reward=0.0).traces
    assert (trace.reward, trace.weight) == (0.0, 1.0)


def test_findings_of_session_and_calls_are_told() -> None:
    session, talk = Session(), start()
    noted = Finding("tool_parse_error", "in the reply", "c0abcdefgh")
    session.calls[0:1] = [structs.replace(say(session, talk, "one"), findings=(noted,))]
    own = Finding("no_model_calls", "", "")
    trajectory = build(session.captured(), builder="prefix_merging", status="failed", reward=None, findings=(own,))
    assert (trajectory.findings, trajectory.status) == ((own, noted), "failed")
