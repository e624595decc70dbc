"""Chat mode: the engine renders and reads, and what it shows of its ids is held against what is stored."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import openai
import pytest
from msgspec import structs

from polar.audit.session import audit_session
from polar.engines.protocol import EngineInfo
from polar.engines.script import Fault
from polar.engines.scripted import Logged, Scripted
from polar.engines.vllm import VllmEngine
from polar.trajectory.builders import Captured, build
from tests.gateway.conftest import Serve, Stand
from tests.gateway.conversation import Conversation, call_text

ONE_LETTER = "x"  # nothing to cut: sampled as the tokenizer spells it


async def finished(stand: Stand, session_id: str) -> Captured:
    """The session, in which nothing is left to find and every path is one that the engine saw and said."""
    captured = await stand.captured(session_id)
    assert audit_session(captured, None, None) == []
    trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
    assert trajectory.accounting.sampled == sum(len(entry.ids) for entry in stand.log)
    for trace in trajectory.traces:
        path = [*trace.prompt_ids, *trace.response_ids]
        assert any(path == [*entry.prompt_ids, *entry.ids][: len(path)] for entry in stand.log)
    return captured


def traces(captured: Captured) -> int:
    return len(build(captured, builder="prefix_merging", status="completed", reward=1.0).traces)


def excluded(captured: Captured) -> dict[str, int]:
    accounting = build(captured, builder="prefix_merging", status="completed", reward=1.0).accounting
    return dict(accounting.excluded) | ({"trained": accounting.trained} if accounting.trained else {})


@pytest.mark.parametrize("stream", [True, False])
async def test_ids_are_those_that_the_engine_shows(serve: Serve, stream: bool) -> None:
    async with serve(lambda call: Scripted(call_text("ls", "So: ")), chat=True) as stand:
        session_id, key = await stand.open()
        message = await Conversation(stand.client(key)).ask(stream=stream)
        assert message["content"].strip() == "So:"
        assert message["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
        captured = await finished(stand, session_id)
        (call,), (entry,) = captured.calls, stand.log
        assert call.prompt_tokens == len(entry.prompt_ids)
        node = captured.nodes[call.choices[0].node or 0]
        assert (node.ids.tolist(), node.logprobs.tolist()) == (entry.ids, entry.logprobs)  # type: ignore[union-attr]
        assert excluded(captured) == {"trained": len(entry.ids)}


async def test_a_history_that_the_engine_renders_as_it_was_is_one_trace(serve: Serve) -> None:
    async with serve(lambda call: Scripted(ONE_LETTER), chat=True) as stand:
        session_id, key = await stand.open()
        await turns(stand, key, 3)
        captured = await finished(stand, session_id)
        assert [call.fork_reason for call in captured.calls] == ["", "", ""]
        assert [call.findings for call in captured.calls] == [(), (), ()]
        assert traces(captured) == 1


async def test_a_restarted_gateway_goes_on_where_the_first_was(serve: Serve) -> None:
    ports: list[int] = []
    said: list[Logged] = []
    keys: list[tuple[str, str]] = []
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Do it."}]
    for _ in range(2):
        async with serve(lambda call: Scripted(ONE_LETTER), chat=True, port=ports[0] if ports else 0) as stand:
            ports.append(int(stand.gateway.url.rsplit(":", 1)[1]))
            keys = keys or [await stand.open()]
            await turns(stand, keys[0][1], 2, messages)
            said += stand.log
            if len(ports) == 2:
                captured = await stand.captured(keys[0][0])
    assert [call.fork_reason for call in captured.calls] == [""] * 4
    assert traces(captured) == 1
    assert excluded(captured) == {"trained": sum(len(entry.ids) for entry in said)}


async def turns(stand: Stand, key: str, count: int, messages: list[dict[str, Any]] | None = None, **extra: Any) -> Conversation:
    talk = Conversation(stand.client(key), tools=None) if messages is None else Conversation(stand.client(key), messages, None)
    for number in range(count):
        await talk.ask(stream=number % 2 == 0, **extra)
        talk.messages.append({"role": "user", "content": "Go on."})
    return talk


async def test_a_history_that_the_engine_spells_otherwise_forks_by_name(serve: Serve) -> None:
    """The scripted policy samples as no tokenizer encodes; the old branch stays, and stays trainable."""
    async with serve(lambda call: Scripted("Well, that is done."), chat=True) as stand:
        session_id, key = await stand.open()
        await turns(stand, key, 3)
        captured = await finished(stand, session_id)
        calls = captured.calls
        assert [call.fork_reason for call in calls[1:]] == ["retokenised", "retokenised"]
        assert [finding.code for call in calls for finding in call.findings] == ["T01", "T01"]
        assert [call.parent_call for call in calls] == ["", calls[0].call_id, calls[1].call_id]
        assert traces(captured) == 3
        assert excluded(captured) == {"trained": sum(len(entry.ids) for entry in stand.log)}


async def test_a_rewritten_history_forks_as_it_always_did(serve: Serve) -> None:
    async with serve(lambda call: Scripted(ONE_LETTER), chat=True) as stand:
        session_id, key = await stand.open()
        talk = await turns(stand, key, 1)
        talk.messages[1]["content"] = "Something that it never said"
        await talk.ask()
        calls = (await finished(stand, session_id)).calls
        assert [call.fork_reason for call in calls] == ["", "history_rewritten"]


async def test_choices_are_siblings(serve: Serve) -> None:
    texts = iter([f"Answer {number}." for number in range(9)])
    async with serve(lambda call: Scripted(next(texts)), chat=True) as stand:
        session_id, key = await stand.open()
        reply = await stand.client(key).chat.completions.create(
            model="p", messages=[{"role": "user", "content": "Say."}], n=3, logprobs=True
        )
        assert {choice.message.content for choice in reply.choices} == {"Answer 0.", "Answer 1.", "Answer 2."}
        logprobs = reply.choices[1].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert all(token.token.startswith("token_id:") for token in logprobs.content)
        captured = await finished(stand, session_id)
        assert traces(captured) == 3
        assert len({captured.nodes[choice.node or 0].parent for choice in captured.calls[0].choices}) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_text_ends_the_reply_and_no_token_after_it_is_trained(serve: Serve, stream: bool) -> None:
    async with serve(lambda call: Scripted("One. Two. END and more. " * 50, delay_per_token=0.002), chat=True) as stand:
        session_id, key = await stand.open()
        talk = Conversation(stand.client(key), tools=None)
        assert (await talk.ask(stream=stream, stop=["END"]))["content"] == "One. Two. "
        captured = await finished(stand, session_id)
        (call,), (entry,) = captured.calls, stand.log
        ids = captured.nodes[call.choices[0].node or 0].ids.tolist()
        assert stand.renderer.decode(ids).startswith("One. Two. END")
        assert not stand.renderer.decode(ids[:-1]).startswith("One. Two. END")
        assert len(entry.ids) < 100
        assert call.sampled == len(entry.ids) == len(ids) + call.tail
        assert excluded(captured) == {"trained": len(ids)} | ({"stop_tail": call.tail} if call.tail else {})


async def test_what_a_stop_text_cut_where_nobody_reads_ids_is_unproven(serve: Serve) -> None:
    async with serve(lambda call: Scripted("One. Two. END and more."), chat=True, decode=False) as stand:
        session_id, key = await stand.open()
        assert (await Conversation(stand.client(key), tools=None).ask(stop=["END"]))["content"] == "One. Two. "
        captured = await finished(stand, session_id)
        assert captured.calls[0].untrained == "unproven"
        assert excluded(captured) == {"unproven": len(stand.log[0].ids)}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "bash"}}])
async def test_a_tool_that_must_be_called_is_served_and_not_trained(serve: Serve, choice: object) -> None:
    async with serve(lambda call: Scripted(call_text("ls")), chat=True) as stand:
        session_id, key = await stand.open()
        await Conversation(stand.client(key)).ask(tool_choice=choice)
        captured = await finished(stand, session_id)
        assert (captured.calls[0].constrained, captured.calls[0].unserved) == (True, ())
        assert excluded(captured) == {"constrained": len(stand.log[0].ids)}


async def test_a_schema_is_served_and_not_trained(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    info = VllmEngine.info

    async def constraining(engine: VllmEngine) -> EngineInfo:
        return structs.replace(await info(engine), constrains=True)

    monkeypatch.setattr(VllmEngine, "info", constraining)
    async with serve(lambda call: Scripted('{"a": 1}'), chat=True) as stand:
        session_id, key = await stand.open()
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
        await Conversation(stand.client(key), tools=None).ask(response_format=wanted)
        captured = await finished(stand, session_id)
        assert (captured.calls[0].constrained, captured.calls[0].unserved) == (True, ())
        assert excluded(captured) == {"constrained": len(stand.log[0].ids)}


async def test_a_prompt_beyond_the_context_is_the_dialects_own_error(serve: Serve) -> None:
    """T10: only the engine knows how long it is."""
    async with serve(lambda call: Scripted("x"), chat=True, max_model_len=64) as stand:
        session_id, key = await stand.open()
        with pytest.raises(openai.BadRequestError) as refused:
            await Conversation(stand.client(key), [{"role": "user", "content": "word " * 100}], None).ask()
        assert refused.value.code == "context_length_exceeded"
        (call,) = (await finished(stand, session_id)).calls
        assert (call.status, call.prompt_tokens, call.findings[0].code) == ("failed", 0, "context_length_exceeded")


FAULTS: Sequence[tuple[Fault, str]] = [
    ("missing_logprob", "T08"),
    ("nan_logprob", "L02"),
    ("sentinel_logprob", "L02"),
    ("usage_off_by_one", "T08"),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("fault", "code"), FAULTS)
async def test_tokens_that_cannot_be_trusted_fail_the_call(serve: Serve, fault: Fault, code: str, stream: bool) -> None:
    async with serve(lambda call: Scripted("Never mind.", fault=fault), chat=True) as stand:
        session_id, key = await stand.open()
        with pytest.raises(openai.APIError):
            await Conversation(stand.client(key), tools=None).ask(stream=stream)
        captured = await stand.captured(session_id)
        assert [call.status for call in captured.calls] == ["failed"]
        assert code in captured.calls[0].error
        assert set(excluded(captured)) == {"untrusted"}


async def test_hanging_up_in_mid_stream_frees_the_engine(serve: Serve) -> None:
    async with serve(lambda call: Scripted("word " * 400, delay_per_token=0.01), chat=True) as stand:
        session_id, key = await stand.open()
        stream = await stand.client(key).chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Go on."}], stream=True
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        left = time.time()
        await stream.close()
        while stand.gateway.sessions.by_id(session_id).runs:
            await asyncio.sleep(0.005)
        captured = await finished(stand, session_id)
        (entry,) = stand.log
        assert entry.aborted_at is not None
        assert entry.aborted_at - left < 0.1
        assert [call.status for call in captured.calls] == ["aborted"]
        assert excluded(captured) == {"aborted": len(entry.ids)}


async def test_the_engine_counts_the_prompt_that_it_would_render(serve: Serve) -> None:
    async with serve(lambda call: Scripted("x"), chat=True) as stand:
        _, key = await stand.open()
        await turns(stand, key, 1, [{"role": "user", "content": "Hi"}])
        assert await count_tokens(stand, key) == (200, len(stand.log[0].prompt_ids))


async def count_tokens(stand: Stand, key: str) -> tuple[int, int]:
    """Status and number of tokens of a prompt that says Hi, by the route of Anthropic Messages."""
    url = f"{stand.gateway.base_url(key)}/v1/messages/count_tokens"
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    async with aiohttp.request("POST", url, json=body) as reply:
        return reply.status, (await reply.json()).get("input_tokens", 0)
