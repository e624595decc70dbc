"""The life of a call, through the real `openai` SDK, held against the policy's own log."""

import asyncio
import time
from dataclasses import replace

import aiohttp
import msgspec
import openai
import pytest

from polar.audit.session import audit_session
from polar.engines.scripted import Scripted, ScriptedCall
from polar.errors import StoreError
from polar.gateway.app import GatewayApp
from polar.specs import SamplingSpec
from polar.store.capture import CaptureReader, CaptureStore
from polar.trajectory.builders import build
from tests.gateway.conftest import Serve, Stand
from tests.gateway.conversation import Conversation, call_text


def working(call: ScriptedCall) -> Scripted:
    """Five turns with tool calls, then an answer."""
    if call.turn < 5:
        return Scripted(call_text(f"echo {call.turn} \\u00e9", "Turn  日本 one.\n"), tokens_per_chunk=4)
    return Scripted("All done — 日本.")


async def test_a_conversation_becomes_one_trace_of_exactly_what_the_policy_saw_and_said(serve: Serve) -> None:
    async with serve(working) as stand:
        session_id, key = await stand.open()
        talk = Conversation(stand.client(key))
        for turn in range(6):
            await talk.ask(stream=turn % 2 == 0)
        trajectory = build(await stand.captured(session_id), builder="prefix_merging", status="completed", reward=1.0)
        (trace,) = trajectory.traces
        last = stand.log[-1]
        assert [*trace.prompt_ids, *trace.response_ids] == [*last.prompt_ids, *last.ids]
        assert trace.response_ids[trace.loss_mask == 1].tolist() == [token for entry in stand.log for token in entry.ids]
        assert trace.response_logprobs[trace.loss_mask == 1].tolist() == [p for entry in stand.log for p in entry.logprobs]
        assert trajectory.accounting.trained == trajectory.accounting.sampled == sum(len(entry.ids) for entry in stand.log)


async def test_every_prompt_starts_with_the_last_prompt_and_what_was_sampled(serve: Serve) -> None:
    async with serve(working) as stand:
        _, key = await stand.open()
        talk = Conversation(stand.client(key))
        for _ in range(6):
            await talk.ask()
        for before, after in zip(stand.log, stand.log[1:], strict=False):
            known = (*before.prompt_ids, *before.ids)
            assert after.prompt_ids[: len(known)] == known


async def test_streamed_and_whole_replies_say_the_same(serve: Serve) -> None:
    async with serve(working) as stand:
        replies = []
        for stream in (True, False):
            _, key = await stand.open()
            reply = await Conversation(stand.client(key)).ask(stream=stream)
            replies.append((reply["content"], reply["tool_calls"][0]["function"]))
        assert replies[0] == replies[1] == ("Turn  日本 one.", {"name": "bash", "arguments": '{"command":  "echo 0 \\u00e9"}'})


async def test_text_streams_before_the_reply_is_complete(serve: Serve) -> None:
    held = asyncio.Event()
    async with serve(lambda call: Scripted("One two three four.", hold_before_end=held)) as stand:
        _, key = await stand.open()
        stream = await stand.client(key).chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Count."}], stream=True
        )
        seen = ""
        async for chunk in stream:
            seen += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if seen == "One two three four.":
                held.set()
        assert held.is_set()


async def test_nothing_that_can_be_acted_on_leaves_before_it_is_durable(serve: Serve) -> None:
    held = asyncio.Event()
    async with serve(lambda call: Scripted(call_text("rm it", "Now. "), hold_before_end=held)) as stand:
        session_id, key = await stand.open()
        stream = await stand.client(key).chat.completions.create(**Conversation(stand.client(key))._request({}), stream=True)
        acted: list[str] = []
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                assert not stored(stand, session_id)
                asyncio.get_running_loop().call_later(0.05, held.set)
            if chunk.choices and (chunk.choices[0].delta.tool_calls or chunk.choices[0].finish_reason):
                acted.append(chunk.choices[0].finish_reason or "tool_calls delta")
                assert [call.status for call in stored(stand, session_id)] == ["ok"]
        assert acted == ["tool_calls delta", "tool_calls"]


async def test_hanging_up_in_mid_stream_frees_the_engine_and_trains_nothing(serve: Serve) -> None:
    async with serve(lambda call: Scripted("word " * 400, delay_per_token=0.01)) as stand:
        session_id, key = await stand.open()
        stream = await stand.client(key).chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Go on."}], stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        left = time.time()
        await stream.close()
        captured = await settled(stand, session_id)
        (entry,) = stand.log
        assert entry.aborted_at is not None
        assert entry.aborted_at - left < 0.1
        assert entry.freed_at is not None
        assert entry.freed_at - entry.aborted_at < 0.05
        assert [call.status for call in captured.calls] == ["aborted"]
        trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
        assert trajectory.traces == ()
        assert trajectory.accounting.excluded == {"aborted": len(entry.ids)}


async def test_a_hung_up_stream_that_is_asked_again_is_superseded(serve: Serve) -> None:
    async with serve(lambda call: Scripted("word " * 40, delay_per_token=0.005)) as stand:
        session_id, key = await stand.open()
        client = stand.client(key)
        stream = await client.chat.completions.create(model="p", messages=[{"role": "user", "content": "Go."}], stream=True)
        await anext(aiter(stream))
        await stream.close()
        talk = Conversation(client, [{"role": "user", "content": "Go."}], None)
        await talk._streamed(model="p")
        captured = await stand.captured(session_id)
        first, second = captured.calls
        assert (first.status, second.status, second.replaces) == ("aborted", "ok", first.call_id)
        accounting = build(captured, builder="prefix_merging", status="completed", reward=1.0).accounting
        assert accounting.excluded == {"superseded": len(stand.log[0].ids)}
        assert accounting.trained == len(stand.log[1].ids)


async def test_a_retry_of_a_whole_reply_joins_the_generation_that_its_client_left(serve: Serve) -> None:
    async with serve(lambda call: Scripted("word " * 20, delay_per_token=0.02)) as stand:
        session_id, key = await stand.open()
        talk = Conversation(stand.client(key), tools=None)
        with pytest.raises(openai.APITimeoutError):
            await talk.ask(timeout=0.1)
        await talk.ask()
        captured = await stand.captured(session_id)
        assert len(stand.log) == 1
        assert [(call.status, call.delivered) for call in captured.calls] == [("ok", True)]


async def test_the_same_request_after_delivery_is_a_new_sample(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        session_id, key = await stand.open()
        for _ in range(2):
            await Conversation(stand.client(key), tools=None).ask()
        trajectory = build(await stand.captured(session_id), builder="prefix_merging", status="completed", reward=1.0)
        assert len(trajectory.traces) == 2
        assert trajectory.traces[0].prompt_ids.tolist() == trajectory.traces[1].prompt_ids.tolist()


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("missing_logprob", "T08"),
        ("usage_off_by_one", "T08"),
        ("nan_logprob", "L02"),
        ("sentinel_logprob", "L02"),
        ("version_gap", "W01"),
        ("die", "EngineError"),
        ("http_500", "EngineError"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_that_cannot_be_trusted_fail_the_call_and_are_counted(
    serve: Serve, fault: str, code: str, stream: bool
) -> None:
    async with serve(lambda call: Scripted("Never trust this.", fault=fault)) as stand:  # type: ignore[arg-type]
        session_id, key = await stand.open()
        with pytest.raises(openai.APIError) as refused:
            await Conversation(stand.client(key), tools=None).ask(stream=stream)
        if isinstance(refused.value, openai.APIStatusError):
            assert refused.value.status_code >= 500
        captured = await stand.captured(session_id)
        (call,) = captured.calls
        assert call.status == "failed"
        assert code in call.findings[0].code + call.findings[0].message
        trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
        assert trajectory.traces == ()
        assert trajectory.accounting.sampled == trajectory.accounting.excluded.get("untrusted", 0) == call.sampled


async def test_the_task_samples_not_the_harness(serve: Serve) -> None:
    async with serve(lambda call: Scripted("word " * 50)) as stand:
        session_id, key = await stand.open(sampling=SamplingSpec(temperature=0.7, max_tokens=8))
        await Conversation(stand.client(key), tools=None).ask(temperature=0.0, max_tokens=20)
        (call,) = (await stand.captured(session_id)).calls
        assert (call.requested.temperature, call.requested.max_tokens) == (0.0, 20)
        assert (call.resolved["temperature"], call.resolved["max_tokens"]) == (0.7, 8)
        assert call.choices[0].finish_reason == "length"
        assert call.sampled == 8


async def test_parallel_calls_of_one_session_are_branches_in_any_order(serve: Serve) -> None:
    async with serve(lambda call: Scripted(f"Reply {call.turn}.", delay_per_token=0.002 * (len(call.prompt_ids) % 3))) as stand:
        session_id, key = await stand.open()
        talks = [Conversation(stand.client(key), [{"role": "user", "content": f"Part {n}" * (n + 1)}]) for n in range(8)]
        for _ in range(3):
            await asyncio.gather(*(talk.ask(stream=n % 2 == 0) for n, talk in enumerate(talks)))
            for talk in talks:
                talk.messages.append({"role": "user", "content": "And now?"})
        trajectory = build(await stand.captured(session_id), builder="prefix_merging", status="completed", reward=1.0)
        assert len(trajectory.traces) == 8
        assert sorted(len(trace.call_ids) for trace in trajectory.traces) == [3] * 8
        assert trajectory.accounting.trained == sum(len(entry.ids) for entry in stand.log)


def stored(stand: Stand, session_id: str) -> list:  # type: ignore[type-arg]
    """The session's calls as another process sees them."""
    reader = CaptureReader.open(stand.capture)
    try:
        return reader.calls(session_id)
    finally:
        reader.close()


async def settled(stand: Stand, session_id: str):  # type: ignore[no-untyped-def]
    """The session once its last call is recorded, without freezing it first."""
    async with asyncio.timeout(5):
        while not stored(stand, session_id):
            await asyncio.sleep(0.01)
    return await stand.captured(session_id)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_committed_answer_that_never_arrived_is_replayed_after_a_restart(
    serve: Serve, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(GatewayApp, "_delivered", lambda *_: None)  # as if the process died before it knew
        async with serve(working) as stand:
            _, key = await stand.open()
            port = int(stand.gateway.url.rsplit(":", 1)[1])
            first = await Conversation(stand.client(key)).ask(stream=stream)
    async with serve(working, port=port) as stand:
        assert stand.gateway.restored == 1
        talk = Conversation(stand.client(key))
        again = await talk.ask(stream=stream)
        assert again == first
        assert stand.log == []
        await talk.ask(stream=stream)
        (session,) = stand.gateway.sessions
        captured = await stand.captured(session.session_id)
        assert [call.delivered for call in captured.calls] == [True, True]
        assert captured.calls[1].parent_call == captured.calls[0].call_id
        assert len(build(captured, builder="prefix_merging", status="completed", reward=1.0).traces) == 1


async def test_a_call_that_cannot_be_stored_fails_and_is_accounted_for_once_it_can(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        session_id, key = await stand.open()
        talk = Conversation(stand.client(key), tools=None)

        async def full(*_: object) -> None:
            raise StoreError("disk full")

        with monkeypatch.context() as broken:
            broken.setattr(CaptureStore, "commit", full)
            for stream in (True, False):
                with pytest.raises(openai.APIError, match="disk full"):
                    await talk.ask(stream=stream)
        assert stored(stand, session_id) == []
        await talk.ask()
        captured = await stand.captured(session_id)
        assert [call.status for call in captured.calls] == ["failed", "failed", "ok"]
        trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
        assert trajectory.accounting.sampled == sum(len(entry.ids) for entry in stand.log)
        assert trajectory.accounting.excluded == {"untrusted": sum(len(entry.ids) for entry in stand.log[:2])}
        assert audit_session(captured, None, None) == []


async def test_an_answer_that_nobody_received_is_not_trained_unless_a_later_prompt_holds_it(serve: Serve) -> None:
    async with serve(working) as stand:
        session_id, key = await stand.open()
        talk = Conversation(stand.client(key))
        for _ in range(2):
            await talk.ask(stream=True)
        captured = await stand.captured(session_id)
    lost = replace(captured, calls=[msgspec.structs.replace(call, delivered=False) for call in captured.calls])
    accounting = build(lost, builder="prefix_merging", status="completed", reward=1.0).accounting
    first, second = (len(entry.ids) for entry in stand.log)
    assert (accounting.trained, accounting.excluded) == (first, {"undelivered": second})
    assert audit_session(lost, None, None) == []


async def test_the_last_call_of_a_session_is_recorded_even_if_it_could_not_be_at_first(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object) -> None:
        raise StoreError("disk full")

    async with serve(lambda call: Scripted("Hello.")) as stand:
        session_id, key = await stand.open()
        talk = Conversation(stand.client(key), tools=None)
        await talk.ask()
        with monkeypatch.context() as broken:
            broken.setattr(CaptureStore, "commit", full)
            with pytest.raises(openai.APIError, match="disk full"):
                await talk.ask()
            with pytest.raises(StoreError, match="disk full"):
                await stand.gateway.sessions.freeze(session_id)
        captured = await stand.captured(session_id)
        assert [call.status for call in captured.calls] == ["ok", "failed"]
        assert sum(call.sampled for call in captured.calls) == sum(len(entry.ids) for entry in stand.log)


async def test_the_same_request_eight_times_at_once_is_eight_samples(serve: Serve) -> None:
    async with serve(working) as stand:
        session_id, key = await stand.open()
        client = stand.client(key)
        for stream in (False, True):
            talks = [Conversation(client) for _ in range(8)]
            said = await asyncio.gather(*(talk.ask(stream=stream) for talk in talks))
            assert len({message["tool_calls"][0]["id"] for message in said}) == 8
        assert len((await stand.captured(session_id)).calls) == len(stand.log) == 16


async def test_a_session_that_is_closed_at_once_counts_its_last_answer_as_delivered(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Done.")) as stand:
        for stream in (False, True) * 5:
            session_id, key = await stand.open()
            await Conversation(stand.client(key), tools=None).ask(stream=stream)
            (call,) = (await stand.captured(session_id)).calls
            assert call.delivered


async def test_stop_texts_beyond_what_can_be_watched_for_are_unserved(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Done.")) as stand:
        session_id, key = await stand.open()
        url = f"{stand.gateway.base_url(key)}/v1/messages"
        body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "stop_sequences": ["x"] * 40}
        async with aiohttp.request("POST", url, json=body) as reply:
            assert reply.status == 200
        (call,) = (await stand.captured(session_id)).calls
        assert (len(call.requested.stop), call.unserved) == (16, ("stop",))


async def test_a_count_of_tokens_that_is_refused_is_no_refused_call(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Done.")) as stand:
        session_id, key = await stand.open()
        async with aiohttp.request("POST", f"{stand.gateway.base_url(key)}/v1/messages/count_tokens", data=b"{") as reply:
            assert reply.status == 400
        assert not stand.gateway.sessions.by_id(session_id).refused_last
