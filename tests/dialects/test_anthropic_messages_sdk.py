"""Anthropic's own SDK talks to a real gateway before a scripted policy."""

import asyncio
import time
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message as SdkMessage

from polar.engines.scripted import Scripted, ScriptedCall
from polar.ids import parse_minted
from polar.trajectory.builders import build
from tests.gateway.conftest import Serve, Stand

pytestmark = pytest.mark.heavy  # a quarter of a minute that `make test` does not have

Json = dict[str, Any]
TOOLS: list[Any] = [
    {
        "name": "bash",
        "description": "Run a command.",
        "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    }
]
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def call_text(*commands: str, before: str = "") -> str:
    """A reply with tool calls, in the model's own spelling: odd spacing."""
    return before + "\n".join(
        f'<tool_call>\n{{"name": "bash", "arguments": {{"command":  "{command}"}}}}\n</tool_call>' for command in commands
    )


def client(stand: Stand, key: str) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=stand.gateway.base_url(key), api_key="any", max_retries=0)


class Talk:
    """One history, asked through the SDK; each tool call gets a result."""

    def __init__(self, stand: Stand, key: str, content: Any = "Do it.") -> None:
        self.client = client(stand, key)
        self.messages: list[Any] = [{"role": "user", "content": content}]

    async def ask(self, *, stream: bool = False, **extra: Any) -> SdkMessage:
        request: Json = {"model": "policy", "max_tokens": 500, "messages": self.messages, "tools": TOOLS, **extra}
        if stream:
            async with self.client.messages.stream(**request) as events:
                reply: SdkMessage = await events.get_final_message()
        else:
            reply = await self.client.messages.create(**request)
        self.messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": f"result of {block.input['command']} <|im_end|>"}
            for block in reply.content
            if block.type == "tool_use"
        ]
        if results:
            self.messages.append({"role": "user", "content": results})
        return reply


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_of_three_turns_is_one_trace(serve: Serve, stream: bool) -> None:
    """Thinking, text, parallel calls and results: each turn continues the one before, to the token."""
    replies = [
        "<think>\nFirst.\n</think>\n\n" + call_text("ls", before="Looking.\n"),
        call_text("cat a", "cat b"),
        "<think>\nLast.\n</think>\n\nDone.",
    ]
    async with serve(lambda call: Scripted(replies[call.turn])) as stand:
        session_id, key = await stand.open()
        talk = Talk(stand, key)
        first, second, third = [await talk.ask(stream=stream, system="Be brief.") for _ in replies]
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        assert [block.input for block in second.content if block.type == "tool_use"] == [
            {"command": "cat a"},
            {"command": "cat b"},
        ]
        assert [reply.stop_reason for reply in (first, second, third)] == ["tool_use", "tool_use", "end_turn"]
        for reply, entry in zip((first, second, third), stand.log, strict=True):
            assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(entry.prompt_ids), len(entry.ids))
        captured = await stand.captured(session_id)
        assert first.content[0].type == "thinking"
        assert parse_minted(first.content[0].signature) == (captured.calls[0].call_id, 0)
        assert [call.dialect for call in captured.calls] == ["anthropic_messages"] * 3
        assert [call.fork_reason for call in captured.calls] == [""] * 3
        trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
        (trace,) = trajectory.traces
        assert trace.loss_mask.sum() == sum(len(entry.ids) for entry in stand.log)


async def test_the_stream_says_what_the_whole_reply_says(serve: Serve) -> None:
    text = "<think>\nHm.\n</think>\n\n" + call_text("ls", "pwd", before="Wait: caf\u00e9 \u2028 \U0001f600\n")
    async with serve(lambda call: Scripted(text)) as stand:
        _, key = await stand.open()
        whole, streamed = await Talk(stand, key).ask(), await Talk(stand, key).ask(stream=True)
        for reply in (whole, streamed):
            assert (
                len({parsed[0] for block in reply.content if block.type == "tool_use" if (parsed := parse_minted(block.id))}) == 1
            )
        minted = {"id", "signature", "parsed_output"}
        shown = [[block.model_dump(exclude=minted, exclude_none=True) for block in reply.content] for reply in (whole, streamed)]
        assert shown[0] == shown[1]
        assert [block["type"] for block in shown[0]] == ["thinking", "text", "tool_use", "tool_use"]


async def test_text_arrives_while_the_policy_still_speaks(serve: Serve) -> None:
    hold = asyncio.Event()
    async with serve(lambda call: Scripted("One two three.", hold_before_end=hold)) as stand:
        _, key = await stand.open()
        async with client(stand, key).messages.stream(
            model="policy", max_tokens=50, messages=[{"role": "user", "content": "Count."}]
        ) as stream:
            async for text in stream.text_stream:
                assert not hold.is_set()
                assert text
                break
            hold.set()
            assert await stream.get_final_text() == "One two three."


async def test_an_image_in_a_tool_result_is_taken(serve: Serve) -> None:
    """A policy that reads only text is shown what stands in its place."""
    prompts: list[str] = []

    def look(call: ScriptedCall) -> Scripted:
        prompts.append(call.prompt_text)
        return Scripted("Seen." if call.turn else call_text("shot"))

    async with serve(look) as stand:
        _, key = await stand.open()
        talk = Talk(stand, key)
        await talk.ask()
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
        talk.messages[-1]["content"][0]["content"] = [{"type": "text", "text": "taken: "}, image]
        reply = await talk.ask()
        assert [block.text for block in reply.content if block.type == "text"] == ["Seen."]
        assert "taken: [image image/png]" in prompts[-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_ends_before_a_stop_sequence_and_names_it(serve: Serve, stream: bool) -> None:
    async with serve(lambda call: Scripted("One. END Two.")) as stand:
        _, key = await stand.open()
        reply = await Talk(stand, key).ask(stream=stream, stop_sequences=["END", "\n"])
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "END")
        assert [block.text for block in reply.content if block.type == "text"] == ["One. "]


async def test_a_reply_that_is_cut_says_so(serve: Serve) -> None:
    async with serve(lambda call: Scripted("word " * 100)) as stand:
        _, key = await stand.open()
        reply = await Talk(stand, key).ask(max_tokens=5)
        assert (reply.stop_reason, reply.usage.output_tokens) == ("max_tokens", 5)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_empty_reply_is_a_reply(serve: Serve, stream: bool) -> None:
    async with serve(lambda call: Scripted("" if not call.turn else "Now.")) as stand:
        session_id, key = await stand.open()
        talk = Talk(stand, key)
        reply = await talk.ask(stream=stream)
        assert reply.stop_reason == "end_turn"
        assert [block.text for block in reply.content if block.type == "text"] == [""]
        talk.messages.append({"role": "user", "content": "Well?"})
        await talk.ask(stream=stream)
        assert [call.fork_reason for call in (await stand.captured(session_id)).calls] == ["", ""]


async def test_tokens_are_counted_as_they_would_be_sent_and_nothing_is_recorded(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        session_id, key = await stand.open()
        talk = Talk(stand, key)
        counted = await talk.client.messages.count_tokens(model="policy", messages=talk.messages, tools=TOOLS)
        reply = await talk.ask()
        assert counted.input_tokens == reply.usage.input_tokens
        assert len((await stand.captured(session_id)).calls) == 1


async def test_models_are_listed_and_any_name_is_a_model(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        _, key = await stand.open()
        listed = [model async for model in client(stand, key).models.list()]
        assert [model.type for model in listed] == ["model"]
        assert (await client(stand, key).models.retrieve("claude-any")).id == "claude-any"


async def test_the_beta_routes_are_the_same_routes(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        _, key = await stand.open()
        reply = await client(stand, key).beta.messages.create(
            model="policy", max_tokens=50, messages=[{"role": "user", "content": "Hi."}], betas=["context-management-2025-06-27"]
        )
        assert [block.text for block in reply.content if block.type == "text"] == ["Hello."]


# Errors, as the SDK tells them


async def test_an_unknown_key_is_an_authentication_error(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await Talk(stand, "pk-guess").ask()


async def test_the_key_may_come_as_api_key_or_as_bearer_token(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        _, key = await stand.open()
        for given in ({"api_key": key}, {"auth_token": key, "api_key": None}):
            talk = Talk(stand, key)
            talk.client = AsyncAnthropic(base_url=stand.gateway.url, max_retries=0, **given)
            assert (await talk.ask()).stop_reason == "end_turn"


async def test_a_malformed_request_is_a_bad_request_by_its_field(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        _, key = await stand.open()
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\].*text"):
            await Talk(stand, key, [{"type": "text", "text": 7}]).ask()


async def test_a_prompt_without_room_is_too_long_in_the_words_at_which_harnesses_compact(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello."), max_model_len=200) as stand:
        _, key = await stand.open()
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 200 maximum"):
            await Talk(stand, key, "word " * 300).ask()


async def test_an_unknown_route_is_not_found(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        _, key = await stand.open()
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await client(stand, key).messages.batches.retrieve("b")


async def test_a_closed_session_is_a_conflict(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        session_id, key = await stand.open()
        await stand.gateway.sessions.freeze(session_id)
        with pytest.raises(anthropic.ConflictError, match="closed to further calls"):
            await Talk(stand, key).ask()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_engine_is_a_server_error_which_clients_ask_again(serve: Serve, stream: bool) -> None:
    async with serve(lambda call: Scripted("Hello.", fault="http_500")) as stand:
        _, key = await stand.open()
        with pytest.raises(anthropic.InternalServerError, match="api_error") as failed:
            await Talk(stand, key).ask(stream=stream)
        assert failed.value.status_code == 503


async def test_a_fault_in_mid_stream_is_an_error_event_and_never_a_clean_end(serve: Serve) -> None:
    async with serve(lambda call: Scripted("word " * 20, fault="die", delay_per_token=0.005)) as stand:
        _, key = await stand.open()
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            await Talk(stand, key).ask(stream=True)


async def test_hanging_up_frees_the_engine(serve: Serve) -> None:
    async with serve(lambda call: Scripted("word " * 400, delay_per_token=0.01)) as stand:
        session_id, key = await stand.open()
        async with client(stand, key).messages.stream(
            model="policy", max_tokens=500, messages=[{"role": "user", "content": "Go on."}]
        ) as stream:
            async for _ in stream.text_stream:
                break
            left = time.time()
        while stand.log[0].freed_at is None:
            await asyncio.sleep(0.005)
        assert stand.log[0].freed_at - left < 1.0
        assert [call.status for call in (await stand.captured(session_id)).calls] == ["aborted"]
