"""Gemini through the real `google-genai` SDK, before the real gateway and a scripted policy."""

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from polar.chat import ImagePart, Message, TextPart
from polar.engines.script import Fault
from polar.engines.scripted import Scripted, ScriptedCall
from polar.gateway import app
from polar.trajectory.builders import build
from tests.gateway.conftest import Serve, Stand
from tests.gateway.conversation import call_text

pytestmark = pytest.mark.heavy  # a quarter of a minute that `make test` does not have

PIXEL = b"\x89PNG\xff\xfb"
THINKING = "<think>\nFirst — look.\n</think>\n\nDone \u2028 é."
THOUGHTS = types.GenerateContentConfig(thinking_config=types.ThinkingConfig(include_thoughts=True))
BASH = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="bash",
            description="Run a command.",
            parameters=types.Schema(type=types.Type.OBJECT, properties={"command": types.Schema(type=types.Type.STRING)}),
        )
    ]
)
TOOLS = types.GenerateContentConfig(
    tools=[BASH],
    system_instruction="Be brief.",
    automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
)


def saying(text: str, **how: Any) -> Any:
    return lambda call: Scripted(text, **how)


def client(stand: Stand, key: str) -> genai.Client:
    """The real SDK, which knows the session by its path."""
    return genai.Client(api_key="any", http_options=types.HttpOptions(base_url=stand.gateway.base_url(key)))


def working(call: ScriptedCall) -> Scripted:
    """Two turns with two calls each, then an answer."""
    if call.turn < 2:
        return Scripted(call_text(f"echo {call.turn} \\u00e9", "Turn  日本 one.\n") + call_text("ls"), tokens_per_chunk=3)
    return Scripted("All done — 日本.")


async def ask(stand: Stand, key: str, stream: bool, contents: Any, config: Any = None) -> list[types.GenerateContentResponse]:
    """The chunks of the answer; a whole answer is one chunk."""
    models = client(stand, key).aio.models
    if not stream:
        return [await models.generate_content(model="any-name", contents=contents, config=config)]
    chunks = await models.generate_content_stream(model="any-name", contents=contents, config=config)
    return [chunk async for chunk in chunks]


def parts_of(chunks: list[types.GenerateContentResponse]) -> list[types.Part]:
    return [part for chunk in chunks for part in chunk.parts or []]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_is_the_policys_text(serve: Serve, stream: bool) -> None:
    async with serve(saying("Done \u2028 é 日本.")) as stand:
        _, key = await stand.open()
        chunks = await ask(stand, key, stream, "Do it.")
        assert "".join(chunk.text or "" for chunk in chunks) == "Done \u2028 é 日本."
        candidates, usage = chunks[-1].candidates, chunks[-1].usage_metadata
        assert candidates is not None
        assert usage is not None
        assert (candidates[0].finish_reason, chunks[-1].model_version) == (types.FinishReason.STOP, "any-name")
        (logged,) = stand.log
        assert (usage.prompt_token_count, usage.candidates_token_count) == (len(logged.prompt_ids), len(logged.ids))


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_are_shown_to_those_who_ask(serve: Serve, stream: bool) -> None:
    async with serve(saying(THINKING)) as stand:
        _, key = await stand.open()
        parts = parts_of(await ask(stand, key, stream, "Do it.", THOUGHTS))
        assert "".join(part.text or "" for part in parts if part.thought).strip() == "First — look."
        assert "".join(part.text or "" for part in parts if not part.thought) == "Done \u2028 é."
        unasked = parts_of(await ask(stand, key, stream, "Do it."))
        assert "".join(part.text or "" for part in unasked) == "Done \u2028 é."
        assert not any(part.thought for part in unasked)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("with_ids", [False, True])
async def test_three_turns_with_parallel_calls_are_one_trace(serve: Serve, stream: bool, with_ids: bool) -> None:
    """A client may drop the ids of calls: their signatures name them."""
    async with serve(working) as stand:
        session_id, key = await stand.open()
        contents = [types.Content(role="user", parts=[types.Part(text="Do it.")])]
        for turn in range(3):
            parts = parts_of(await ask(stand, key, stream, contents, TOOLS))
            calls = [part.function_call for part in parts if part.function_call]
            assert [call.args for call in calls] == ([{"command": f"echo {turn} é"}, {"command": "ls"}] if turn < 2 else [])
            for call in calls:
                call.id = call.id if with_ids else None
            results = [types.FunctionResponse(id=call.id, name=call.name, response={"output": "r"}) for call in calls]
            contents.append(types.Content(role="model", parts=parts))
            contents.append(types.Content(role="user", parts=[types.Part(function_response=result) for result in results]))
        captured = await stand.captured(session_id)
        (trace,) = build(captured, builder="prefix_merging", status="completed", reward=1.0).traces
        assert trace.response_ids[trace.loss_mask == 1].tolist() == [token for entry in stand.log for token in entry.ids]
        answered = [message.tool_call_id for message in trace.response_messages if message.role == "tool"]
        assert answered == [call.id for message in trace.response_messages for call in message.tool_calls]


async def test_the_sdks_own_chat_is_one_trace_streamed_and_whole(serve: Serve) -> None:
    """It keeps each chunk of a stream as a content of its own."""
    async with serve(saying(THINKING, tokens_per_chunk=2)) as stand:
        session_id, key = await stand.open()
        chat = client(stand, key).aio.chats.create(model="m", config=THOUGHTS)
        async for _ in await chat.send_message_stream("One."):
            pass
        await chat.send_message("Two.")
        async for _ in await chat.send_message_stream("Three."):
            pass
        captured = await stand.captured(session_id)
        assert [call.fork_reason for call in captured.calls] == ["", "", ""]
        assert len(build(captured, builder="prefix_merging", status="completed", reward=1.0).traces) == 1


async def test_the_sdks_automatic_function_calling_completes(serve: Serve) -> None:
    def bash(command: str) -> str:
        """Run a command."""
        return f"ran {command}"

    def script(call: ScriptedCall) -> Scripted:
        return Scripted("Done." if call.turn else call_text("ls"))

    async with serve(script) as stand:
        session_id, key = await stand.open()
        (reply,) = await ask(stand, key, False, "Do it.", types.GenerateContentConfig(tools=[bash]))
        assert reply.text == "Done."
        first, second = (await stand.captured(session_id)).calls
        assert (second.parent_call, second.fork_reason) == (first.call_id, "")


def streamed(stand: Stand, key: str) -> str:
    """What the synchronous client reads."""
    with client(stand, key) as sdk:
        return "".join(chunk.text or "" for chunk in sdk.models.generate_content_stream(model="m", contents="Do it."))


async def test_the_synchronous_client_reads_the_same(serve: Serve) -> None:
    async with serve(saying("Done \u2028 é.")) as stand:
        _, key = await stand.open()
        assert await asyncio.to_thread(streamed, stand, key) == "Done \u2028 é."


async def test_images_are_recorded(serve: Serve) -> None:
    async with serve(saying("A picture.")) as stand:
        session_id, key = await stand.open()
        contents: Any = [types.Part.from_bytes(data=PIXEL, mime_type="image/png"), "What is it?"]
        await ask(stand, key, False, contents)
        captured = await stand.captured(session_id)
        (call,) = captured.calls
        message = captured.messages[call.message_hashes[0]]
        assert message == Message("user", (ImagePart("image/png", base64.b64encode(PIXEL).decode()), TextPart("What is it?")))
        assert call.unserved == ("image",)


async def test_tokens_are_counted_as_the_prompt_would_have_them(serve: Serve) -> None:
    async with serve(saying("Hello.")) as stand:
        _, key = await stand.open()
        counted = await client(stand, key).aio.models.count_tokens(model="m", contents="Count this.")
        await ask(stand, key, False, "Count this.")
        assert counted.total_tokens == len(stand.log[0].prompt_ids)


async def test_models_are_listed_and_any_name_is_answered(serve: Serve) -> None:
    async with serve(saying("Hello."), max_model_len=4096) as stand:
        _, key = await stand.open()
        models = client(stand, key).aio.models
        (listed,) = [model async for model in await models.list()]
        assert listed.input_token_limit == 4096
        assert (await models.get(model="gemini-x")).name == "models/gemini-x"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_request_is_a_client_error(serve: Serve, stream: bool) -> None:
    async with serve(saying("Hello."), max_model_len=200) as stand:
        session_id, key = await stand.open()
        with pytest.raises(errors.ClientError, match="exceeds the maximum number of tokens allowed") as too_long:
            await ask(stand, key, stream, "word " * 300)
        assert (too_long.value.code, too_long.value.status) == (400, "INVALID_ARGUMENT")
        with pytest.raises(errors.ClientError, match="candidateCount: 2 is not served"):
            await ask(stand, key, stream, "Hi", types.GenerateContentConfig(candidate_count=2))
        with pytest.raises(errors.ClientError) as unknown:
            await ask(stand, "pk-guess", stream, "Hi")
        assert (unknown.value.code, unknown.value.status) == (401, "UNAUTHENTICATED")
        with pytest.raises(errors.ClientError) as unserved:
            await client(stand, key).aio.models.embed_content(model="m", contents="Hi")
        assert (unserved.value.code, unserved.value.status) == (404, "NOT_FOUND")
        await stand.gateway.sessions.freeze(session_id)
        with pytest.raises(errors.ClientError) as frozen:
            await ask(stand, key, stream, "Hi")
        assert (frozen.value.code, frozen.value.status) == (409, "FAILED_PRECONDITION")


@pytest.mark.parametrize(("fault", "code"), [("usage_off_by_one", 500), ("die", 503)])
async def test_a_fault_after_streaming_began_is_a_server_error_and_no_clean_end(serve: Serve, fault: Fault, code: int) -> None:
    async with serve(saying("Many words of text.", fault=fault, delay_per_token=0.01)) as stand:
        _, key = await stand.open()
        seen: list[str] = []
        with pytest.raises(errors.ServerError) as raised:
            await read_into(seen, stand, key)
        assert "".join(seen)
        assert raised.value.code == code


async def read_into(seen: list[str], stand: Stand, key: str) -> None:
    sdk = client(stand, key)
    async for chunk in await sdk.aio.models.generate_content_stream(model="m", contents="Hi"):
        seen += chunk.text or ""


async def test_keep_alives_are_seen_by_no_client(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "HEADERS_AFTER", 0.03)
    monkeypatch.setattr(app, "KEEP_ALIVE_EVERY", 0.03)
    async with serve(saying("<think>\nLook.\n</think>\n\nDone.", delay_per_token=0.06)) as stand:
        _, key = await stand.open()
        for config in (THOUGHTS, None):  # thoughts that are not shown are keep-alives
            parts = parts_of(await ask(stand, key, True, "Do it.", config))
            assert "".join(part.text or "" for part in parts if not part.thought) == "Done."
        assert await asyncio.to_thread(streamed, stand, key) == "Done."


async def test_a_stream_that_is_hung_up_on_is_aborted(serve: Serve) -> None:
    async with serve(saying("word " * 200, delay_per_token=0.01)) as stand:
        session_id, key = await stand.open()
        stream: AsyncIterator[Any] = await client(stand, key).aio.models.generate_content_stream(model="m", contents="Hi")
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        while not stand.gateway.sessions.by_id(session_id).calls:
            await asyncio.sleep(0.01)
        (call,) = (await stand.captured(session_id)).calls
        assert call.status == "aborted"
        assert len(stand.log[0].ids) < 200
