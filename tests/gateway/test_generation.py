"""Several choices, stop texts and log-probabilities: what one call may be asked for beyond one answer."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.audit.session import prove_session
from polar.engines.scripted import Scripted
from polar.gateway.stopping import TextStopper
from polar.trajectory.builders import build
from tests.gateway.conftest import Serve
from tests.gateway.conversation import Conversation, call_text

OPEN_CALL = 'Go. <tool_call>\n{"name": "x" '
short = st.text("ab<", max_size=12)


@given(st.lists(short, max_size=8), st.lists(st.text("ab<", min_size=1, max_size=3), min_size=1, max_size=3))
def test_a_stopper_shows_all_before_the_first_stop_text_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    stopper = TextStopper(stops)
    shown = "".join([*(stopper.push(piece) for piece in pieces), stopper.finish()])
    assert shown == stopper.shown
    assert whole.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if stopper.found:
        assert whole.startswith(shown + stopper.found)
    else:
        assert shown == whole


async def test_a_stop_text_ends_the_reply_and_its_tokens_stay(serve: Serve) -> None:
    async with serve(lambda call: Scripted("One. Two. END and more that nobody reads. " * 20, tokens_per_chunk=4)) as stand:
        for stream in (False, True):
            session_id, key = await stand.open()
            talk = Conversation(stand.client(key), tools=None)
            assert (await talk.ask(stream=stream, stop=["END"]))["content"] == "One. Two. "
            talk.messages.append({"role": "user", "content": "Go on."})
            await talk.ask(stop="Two")
            captured = await stand.captured(session_id)
            first, second = captured.calls
            assert first.choices[0].stop_sequence == "END"
            assert first.requested.stop == ("END",)
            assert second.parent_call == first.call_id
            assert second.fork_reason == ""
            node = captured.nodes[first.choices[0].node or 0]
            text = stand.renderer.decode(node.ids.tolist())
            assert text.startswith("One. Two. END")
            assert len(text) < len("One. Two. END and more")
            assert first.sampled - first.tail == len(node.ids)
            trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
            tails = first.tail + second.tail
            assert trajectory.accounting.excluded == ({"stop_tail": tails} if tails else {})
            assert len(trajectory.traces) == 1


async def test_the_engine_is_told_to_stop_at_a_stop_text(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Go. END " + "word " * 2000, delay_per_token=0.005)) as stand:
        _, key = await stand.open()
        assert (await Conversation(stand.client(key), tools=None).ask(stop=["END"]))["content"] == "Go. "
        (entry,) = stand.log
        assert entry.aborted_at is not None
        assert len(entry.ids) < 200


async def test_choices_are_siblings_and_each_is_trained_once(serve: Serve) -> None:
    texts = iter([f"Answer {number}." for number in range(20)])
    async with serve(lambda call: Scripted(next(texts))) as stand:
        session_id, key = await stand.open()
        client = stand.client(key)
        reply = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Say."}], n=3)
        said = [choice.message.content for choice in reply.choices]
        assert sorted(said, key=str) == ["Answer 0.", "Answer 1.", "Answer 2."]
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        again = await client.chat.completions.create(
            model="policy",
            messages=[
                {"role": "user", "content": "Say."},
                {"role": "assistant", "content": said[1]},
                {"role": "user", "content": "Go on."},
            ],
        )
        assert again.choices[0].message.content == "Answer 3."
        captured = await stand.captured(session_id)
        call, follower = captured.calls
        assert (follower.parent_call, follower.fork_reason) == (call.call_id, "")
        assert len({captured.nodes[choice.node or 0].parent for choice in call.choices}) == 1
        trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
        assert len(trajectory.traces) == 3
        assert trajectory.accounting.trained == sum(len(entry.ids) for entry in stand.log)


async def test_a_fault_in_one_choice_fails_the_call(serve: Serve) -> None:
    scripts = iter([Scripted("Good."), Scripted("Bad.", fault="die"), Scripted("Good.")])
    async with serve(lambda call: next(scripts)) as stand:
        session_id, key = await stand.open()
        assert await stand.post(key, {"messages": [{"role": "user", "content": "Say."}], "n": 3}) == 503
        (call,) = (await stand.captured(session_id)).calls
        assert call.status == "failed"


async def test_log_probabilities_are_those_that_are_recorded(serve: Serve) -> None:
    async with serve(lambda call: Scripted(call_text("ls", before="Look: "))) as stand:
        session_id, key = await stand.open()
        reply = await stand.client(key).chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Say."}], logprobs=True
        )
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        (entry,) = stand.log
        assert [token.logprob for token in logprobs.content or []] == entry.logprobs
        assert "".join(token.token for token in logprobs.content or []).startswith("Look: <tool_call>")
        assert all(math.isfinite(token.logprob) for token in logprobs.content or [])
        assert (await stand.captured(session_id)).calls[0].sampled == len(entry.ids)


@pytest.mark.parametrize(
    ("said", "stop", "shown", "kept"),
    [
        ("Hello\n\nWorld and more", "\n\n", "Hello", "Hello\n\n"),
        ("Hello\n \n\n \nWorld", "\n\n", "Hello\n ", "Hello\n \n\n"),
        (
            'Go. <tool_call>\n{"name": "x" END lots of more',
            "END",
            'Go. <tool_call>\n{"name": "x" ',
            'Go. <tool_call>\n{"name": "x" END',
        ),
        ("Caf\u00e9 \u65e5\u672cEND more", "\u672cEND", "Caf\u00e9 \u65e5", "Caf\u00e9 \u65e5\u672cEND"),
        ("<think>END</think>Yes. END. more", "END", "Yes. ", "<think>END</think>Yes. END"),
        ("All of it. END", "END", "All of it. ", "All of it. END"),
    ],
)
async def test_no_token_after_a_stop_text_is_trained_however_late_it_shows(
    serve: Serve, said: str, stop: str, shown: str, kept: str
) -> None:
    async with serve(lambda call: Scripted(said)) as stand:
        session_id, key = await stand.open()
        assert (await Conversation(stand.client(key), tools=None).ask(stop=[stop]))["content"] == shown
        captured = await stand.captured(session_id)
        (call,) = captured.calls
        ids = captured.nodes[call.choices[0].node or 0].ids.tolist()
        assert stand.renderer.decode(ids).startswith(kept)
        assert not stand.renderer.decode(ids[:-1]).startswith(kept), "the last id is the one that completes the stop text"
        assert len(ids) + call.tail == call.sampled == len(stand.log[0].ids)
        trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
        assert trajectory.accounting.trained == len(ids)


async def test_a_choice_that_is_kept_keeps_its_siblings_from_being_superseded(serve: Serve) -> None:
    scripts = iter([Scripted("Kept."), Scripted("Cut off", finish="length"), Scripted("After.")])
    async with serve(lambda call: next(scripts)) as stand:
        session_id, key = await stand.open()
        client = stand.client(key)
        asked = [{"role": "user", "content": "Say."}]
        await client.chat.completions.create(model="policy", messages=asked, n=2)  # type: ignore[arg-type]
        later = [*asked, {"role": "assistant", "content": "Kept."}, {"role": "user", "content": "Go on."}]
        await client.chat.completions.create(model="policy", messages=later)  # type: ignore[arg-type]
        captured = await stand.captured(session_id)
        trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
        assert trajectory.accounting.excluded == {}
        assert trajectory.accounting.trained == sum(len(entry.ids) for entry in stand.log)
        assert prove_session(captured, None, stand.renderer).findings == []


async def test_twins_are_told_apart_by_an_audit(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Same.", tokens_per_chunk=9)) as stand:
        session_id, key = await stand.open()
        client = stand.client(key)
        asked = [{"role": "user", "content": "Say."}]
        first = await client.responses.create(model="policy", input="Say.")
        await client.chat.completions.create(model="policy", messages=asked, n=4)  # type: ignore[arg-type]
        later = [*asked, {"role": "assistant", "content": "Same."}, {"role": "user", "content": "Go on."}]
        await client.chat.completions.create(model="policy", messages=later)  # type: ignore[arg-type]
        assert first.output_text == "Same."
        assert prove_session(await stand.captured(session_id), None, stand.renderer).findings == []
