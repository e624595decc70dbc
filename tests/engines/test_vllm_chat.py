"""vLLM's chat route: what its recorded replies say, what the scripted engine shows, and what the client refuses."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import Raw
from tokenizers import Tokenizer

from polar.chat import ChatRequest, Delta, ImagePart, Message, ReasoningDelta, TextDelta, TextPart, Tool, ToolCall, Usage
from polar.engines.chat_wire import ChatReply
from polar.engines.protocol import Chatted, ResolvedSampling
from polar.engines.script import Fault
from polar.engines.scripted import Scripted, ScriptedEngine
from polar.engines.vllm import VllmEngine
from polar.engines.vllm_chat import PromptMemory
from polar.engines.vllm_versions import Versions
from polar.errors import CaptureError, EngineError, EngineRefusal
from polar.specs import VersionSpan
from polar.tokens.rendering import ParsedReply
from tests.engines.servers import freed, logged, replaying, serving, stream

SAMPLES = Path(__file__).parent / "samples"
TEXT = "The quick brown fox jumps over the lazy dog, and then it rests. Größe 😀!"
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command":"ls -la"}}\n</tool_call>'
SAMPLING = ResolvedSampling(max_tokens=1000, stop_token_ids=(2,))
BASH = Tool("bash", "Run a command.", Raw(b'{"type": "object", "properties": {"command": {"type": "string"}}}'))
HOUR = 3600.0


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


def user(text: str) -> Message:
    return Message("user", (TextPart(text),))


def asking(*messages: Message, tools: tuple[Tool, ...] = (), stream: bool = True, choice: str = "auto") -> ChatRequest:
    return ChatRequest("any", messages or (user("hi"),), tools, stream=stream, tool_choice=choice)


async def collect(engine: VllmEngine, request: ChatRequest | None = None, request_id: str = "r1") -> list[Chatted]:
    return [piece async for piece in engine.chat(request_id, request or asking(), SAMPLING, session_id="s")]


def tokens(pieces: list[Chatted]) -> tuple[list[int], list[float]]:
    parts = [piece.tokens for piece in pieces]
    return [token for part in parts for token in part.ids], [value for part in parts for value in part.logprobs]


def deltas(pieces: list[Chatted]) -> list[Delta]:
    return [delta for piece in pieces for delta in piece.deltas]


def prompts(pieces: list[Chatted]) -> list[list[int]]:
    return [piece.prompt_ids.tolist() for piece in pieces if piece.prompt_ids is not None]


@asynccontextmanager
async def saying(tokenizer: Tokenizer, script: Scripted, *without: str) -> AsyncIterator[tuple[VllmEngine, ScriptedEngine]]:
    scripted = ScriptedEngine(tokenizer, lambda call: script, without=without)
    async with serving(scripted) as engine:
        yield engine, scripted


def read(name: str, size: int = 1 << 20) -> list[Chatted]:
    """A recorded reply, as it would arrive in pieces of `size` bytes."""
    memory, body = PromptMemory(), (SAMPLES / name).read_bytes()
    reply = ChatReply(lambda text: memory.read("s", text))
    if body.startswith(b"{"):
        reply.whole(body)
        return [reply.end()]
    pieces = [reply.feed(body[start : start + size]) for start in range(0, len(body), size)]
    return [*(piece for piece in pieces if piece is not None), reply.end()]


class TestRecorded:
    """Replies of vLLM 0.32."""

    @pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
    def test_a_streamed_reply_is_the_whole_one(self, size: int) -> None:
        streamed, (whole,) = read("vllm_chat_stream.json", size), read("vllm_chat.json")
        assert tokens(streamed) == tokens([whole])
        assert tokens(streamed)[0] == [504, 3575, 282, 4649, 314, 7042, 30, 2], "the end of the turn has no text"
        assert prompts(streamed) == prompts([whole])
        assert len(prompts(streamed)[0]) == 40
        last = streamed[-1]
        assert (last.parsed, last.tokens.finish, last.tokens.usage) == (whole.parsed, "stop", Usage(40, 8))
        assert last.parsed == ParsedReply("The capital of France is Paris.", "", ())
        assert "".join(delta.text for delta in deltas(streamed)) == last.parsed.text

    def test_only_the_last_piece_has_finish_and_parse_and_only_the_first_the_prompt(self) -> None:
        first, *middle, last = read("vllm_chat_stream.json", 300)
        assert first.prompt_ids is not None
        assert all(piece.prompt_ids is None for piece in (*middle, last))
        assert all(piece.tokens.finish is None and piece.parsed is None for piece in (first, *middle))

    def test_a_named_call_ends_with_stop_and_events_without_a_word_have_tokens(self) -> None:
        pieces = read("vllm_tool_named_stream_true.json", 500)
        last = pieces[-1]
        assert last.tokens.finish == "stop"
        assert last.parsed is not None
        ((name, arguments),) = last.parsed.tool_calls
        assert (name, last.parsed.text) == ("get_weather", "")
        assert json.loads(arguments)
        body = (SAMPLES / "vllm_tool_named_stream_true.json").read_text()
        events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
        assert len(tokens(pieces)[0]) == sum(len(choice.get("token_ids", [])) for each in events for choice in each["choices"])

    def test_a_required_call_ends_with_tool_calls_which_is_a_stop_too(self) -> None:
        (whole,) = read("vllm_tool_required.json")
        assert whole.tokens.finish == "stop"
        assert whole.parsed is not None
        assert [name for name, _ in whole.parsed.tool_calls] == ["get_weather"]
        assert whole.tokens.usage is not None
        assert whole.tokens.usage.completion_tokens == len(whole.tokens.ids) == len(whole.tokens.logprobs)


class TestScripted:
    @pytest.mark.parametrize("streamed", [True, False])
    async def test_what_arrives_is_what_was_sampled(self, tokenizer: Tokenizer, streamed: bool) -> None:
        async with saying(tokenizer, Scripted(TEXT)) as (engine, scripted):
            pieces = await collect(engine, asking(stream=streamed))
        (entry,) = scripted.log
        assert tokens(pieces) == (entry.ids, entry.logprobs)
        assert prompts(pieces) == [list(entry.prompt_ids)]
        assert pieces[-1].tokens.versions == (VersionSpan(0, len(entry.ids), 0),)
        assert pieces[-1].tokens.usage == Usage(len(entry.prompt_ids), len(entry.ids))
        assert pieces[-1].parsed == ParsedReply(TEXT, "", ())
        assert "".join(delta.text for delta in deltas(pieces)) == TEXT

    async def test_text_arrives_while_the_engine_still_samples(self, tokenizer: Tokenizer) -> None:
        async with saying(tokenizer, Scripted(TEXT, hold_before_end=HOUR)) as (engine, scripted):
            async with aclosing(engine.chat("r1", asking(), SAMPLING)) as pieces:
                said = ""
                while not said.startswith("The quick"):
                    said += "".join(delta.text for delta in (await anext(pieces)).deltas)
            assert (await freed(scripted)).finish == "abort"

    @pytest.mark.parametrize("streamed", [True, False])
    async def test_reasoning_text_and_calls_come_apart(self, tokenizer: Tokenizer, streamed: bool) -> None:
        async with saying(tokenizer, Scripted(f"<think>Look.</think>Listing.\n{CALL}\n{CALL}")) as (engine, _):
            pieces = await collect(engine, asking(tools=(BASH,), stream=streamed))
        said = deltas(pieces)
        assert "".join(each.text for each in said if isinstance(each, ReasoningDelta)) == "Look."
        assert "".join(each.text for each in said if isinstance(each, TextDelta)) == "Listing.\n"
        assert pieces[-1].tokens.finish == "stop"
        call = ("bash", '{"command": "ls -la"}')
        assert pieces[-1].parsed == ParsedReply("Listing.\n", "Look.", (call, call))

    async def test_one_choice_whatever_the_request_says(self, tokenizer: Tokenizer) -> None:
        request = msgspec.structs.replace(asking(), sampling=msgspec.structs.replace(asking().sampling, n=3))
        async with saying(tokenizer, Scripted(TEXT)) as (engine, scripted):
            await collect(engine, request)
        assert len(scripted.log) == 1

    async def test_a_later_prompt_is_encoded_anew_and_so_drifts(self, tokenizer: Tokenizer) -> None:
        async with saying(tokenizer, Scripted("Hello there, friend.")) as (engine, _):
            first = await collect(engine)
            reply = Message("assistant", (TextPart("Hello there, friend."),))
            second = await collect(engine, asking(user("hi"), reply, user("go on")), "r2")
        (before,), (after,) = prompts(first), prompts(second)
        sampled = tokens(first)[0]
        assert after[: len(before)] == before
        assert after[: len(before) + len(sampled)] != before + sampled
        assert tokenizer.decode(after, skip_special_tokens=False).startswith(tokenizer.decode(before + sampled, False))

    async def test_prompts_of_a_session_are_the_engines_own(self, tokenizer: Tokenizer) -> None:
        """With the prefix skipped and without: other messages, a longer history, a shorter one again."""
        histories = [(user("a"),), (user("b"), user("c")), (user("b"), user("c"), user("d")), (user("b"),), (user("b"),)]
        async with saying(tokenizer, Scripted("ok")) as (engine, scripted):
            told = [prompts(await collect(engine, asking(*history))) for history in histories]
        assert told == [[list(entry.prompt_ids)] for entry in scripted.log]


class TestRequest:
    async def body(self, request: ChatRequest, sampling: ResolvedSampling = SAMPLING) -> dict[str, object]:
        async with replaying(stream((SAMPLES / "vllm_chat_stream.json").read_bytes())) as (engine, requests):
            async for _ in engine.chat("r1", request, sampling):
                pass
        head, _, body = requests[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/chat/completions ")
        assert b"x-request-id" not in head.lower(), "vLLM would take it for the request id, and aborts would miss"
        decoded: dict[str, object] = json.loads(body)
        return decoded

    async def test_every_sampling_parameter_is_pinned(self) -> None:
        assert await self.body(asking()) == {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 1000,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "request_id": "r1",
            "logprobs": True,
            "return_token_ids": True,
            "stop_token_ids": [2],
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def test_a_history_is_written_back_in_openais_form(self) -> None:
        call = ToolCall("call_1", "bash", '{"command": ')
        image = ImagePart(media_type="image/png", data="aGk=")
        body = await self.body(
            asking(
                Message("system", (TextPart("Be "), TextPart("brief."))),
                Message("user", (TextPart("Look: "), image, ImagePart(url="https://host/i.png"))),
                Message("assistant", (), "Hm.", (call,)),
                Message("tool", (TextPart("files"),), tool_call_id="call_1", is_error=True),
            )
        )
        assert body["messages"] == [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Look: "},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
                    {"type": "image_url", "image_url": {"url": "https://host/i.png"}},
                ],
            },
            {
                "role": "assistant",
                "content": "",
                "reasoning": "Hm.",
                "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command": '}}],
            },
            {"role": "tool", "content": "files", "tool_call_id": "call_1"},
        ]

    @pytest.mark.parametrize(
        ("choice", "wire"),
        [("auto", "auto"), ("required", "required"), ("bash", {"type": "function", "function": {"name": "bash"}})],
    )
    async def test_tools_and_the_choice_among_them(self, choice: str, wire: object) -> None:
        body = await self.body(asking(tools=(BASH, Tool("bare", "", Raw(b""))), choice=choice))
        bash = {"name": "bash", "description": "Run a command.", "parameters": json.loads(bytes(BASH.parameters))}
        assert body["tools"] == [
            {"type": "function", "function": bash},
            {"type": "function", "function": {"name": "bare"}},
        ]
        assert body["tool_choice"] == wire

    async def test_a_schema_and_what_the_template_is_told(self) -> None:
        request = msgspec.structs.replace(asking(), extra={"chat_template_kwargs": Raw(b'{"enable_thinking":false}')})
        body = await self.body(request, ResolvedSampling(max_tokens=5, json_schema=Raw(b'{"type":"object"}')))
        assert body["structured_outputs"] == {"json": {"type": "object"}}
        assert body["chat_template_kwargs"] == {"enable_thinking": False}


class TestClosing:
    @pytest.mark.parametrize("streamed", [True, False])
    async def test_abort_ends_the_reply_with_what_was_sampled(self, tokenizer: Tokenizer, streamed: bool) -> None:
        async with saying(tokenizer, Scripted(TEXT, hold_before_end=HOUR)) as (engine, scripted):
            call = asyncio.ensure_future(collect(engine, asking(stream=streamed)))
            await logged(scripted, 11)
            await engine.abort("r1")
            pieces = await call
        assert pieces[-1].tokens.finish == "abort"
        assert tokens(pieces)[0] == scripted.log[0].ids

    async def test_a_closed_generator_aborts_on_the_server_by_the_routes_own_id(self, tokenizer: Tokenizer) -> None:
        async with saying(tokenizer, Scripted(TEXT, hold_before_end=HOUR)) as (engine, scripted):
            async with aclosing(engine.chat("r1", asking(), SAMPLING)) as pieces:
                await anext(pieces)
            assert (await freed(scripted)).finish == "abort"
            await engine.close()
        assert [control.body for control in scripted.controls] == ['{"request_ids":["chatcmpl-r1"]}']


class TestFaults:
    @pytest.mark.parametrize("streamed", [True, False])
    @pytest.mark.parametrize(("fault", "match"), [("missing_logprob", "T08"), ("die", "broke off"), ("http_500", "with 500")])
    async def test_a_broken_reply_is_refused(self, tokenizer: Tokenizer, fault: Fault, match: str, streamed: bool) -> None:
        async with saying(tokenizer, Scripted(TEXT, fault=fault)) as (engine, _):
            with pytest.raises(EngineError, match=match):
                await collect(engine, asking(stream=streamed))

    async def test_a_null_logprob_is_nan_and_a_wrong_usage_is_passed_on(self, tokenizer: Tokenizer) -> None:
        async with saying(tokenizer, Scripted(TEXT, fault="nan_logprob")) as (engine, _):
            assert math.isnan(tokens(await collect(engine))[1][0])
        async with saying(tokenizer, Scripted("ab", fault="usage_off_by_one")) as (engine, scripted):
            usage = (await collect(engine))[-1].tokens.usage
            assert usage is not None
            assert usage.completion_tokens == len(scripted.log[0].ids) + 1

    @pytest.mark.parametrize(
        ("recorded", "changed", "match"),
        [
            (b'"prompt_token_ids":[1,9690', b'"other":[1,9690', "T08.*no ids of the prompt"),
            (b'"prompt_token_ids":[1,9690', b'"prompt_token_ids":[1,"9690"', "expected token ids"),
            (b',"token_ids":[3575]', b"", "T08: the engine sent 0 token ids with 1 log-probabilities"),
            (b'"token_ids":[3575]', b'"token_ids":null', "T08: the engine sent 0 token ids with 1 log-probabilities"),
            (b'"finish_reason":"stop"', b'"finish_reason":"repetition"', "'repetition'"),
            (b'"finish_reason":"stop"', b'"finish_reason":null', "without a finish reason"),
            (b'data: {"id":"chatcmpl-952a9329c1897486","object":"chat.completion.chunk","created":1796041440,"model":"smol",'
             b'"choices":[],', b'data: {"error":{"message":"out of memory","code":500},', "out of memory"),
        ],
    )  # fmt: skip
    async def test_ids_are_never_invented(self, recorded: bytes, changed: bytes, match: str) -> None:
        body = (SAMPLES / "vllm_chat_stream.json").read_bytes()
        assert recorded in body
        async with replaying(stream(body.replace(recorded, changed))) as (engine, _):
            with pytest.raises(EngineError, match=match):
                await collect(engine)

    async def test_a_prompt_beyond_the_context_is_a_refusal_in_the_servers_words(self, tokenizer: Tokenizer) -> None:
        async with serving(ScriptedEngine(tokenizer, lambda call: Scripted(TEXT), max_model_len=8)) as engine:
            with pytest.raises(EngineRefusal, match="400: This model's maximum context length is 8 tokens"):
                await collect(engine)


class TestVersions:
    async def test_new_weights_in_the_course_of_a_reply_are_refused_by_name(self, tokenizer: Tokenizer) -> None:
        async with saying(tokenizer, Scripted(TEXT, delay_per_token=0.002)) as (engine, scripted):
            call = asyncio.ensure_future(collect(engine))
            await logged(scripted, 4)
            await engine.update_version(7)
            with pytest.raises(CaptureError, match="W01: the weights went from version 0 to 7"):
                await call
            assert (await collect(engine))[-1].tokens.versions[0].policy_version == 7

    async def test_somebody_elses_update_is_seen_too(self, tokenizer: Tokenizer) -> None:
        async with saying(tokenizer, Scripted("ok")) as (engine, scripted):
            await collect(engine)
            scripted.version = "v3"
            with pytest.raises(CaptureError, match="W01"):
                await collect(engine)
            assert (await collect(engine))[-1].tokens.versions[0].policy_version == 3

    async def test_a_server_that_names_no_versions_has_the_one_that_this_client_named(self, tokenizer: Tokenizer) -> None:
        async with saying(tokenizer, Scripted("ok"), "/weight_info") as (engine, _):
            assert (await collect(engine))[-1].tokens.versions[0].policy_version == 0
            await engine.update_version(4)
            assert (await collect(engine))[-1].tokens.versions[0].policy_version == 4

    async def test_calls_that_end_together_share_an_answer(self) -> None:
        asked = 0

        async def ask() -> int | None:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0.01)
            return 7

        versions = Versions(ask)
        assert await asyncio.gather(*(versions.now() for _ in range(50))) == [7] * 50
        assert asked == 1
        first = asyncio.ensure_future(versions.now())
        await asyncio.sleep(0.005)  # the server has been asked: what it answers may be older than the next question
        await asyncio.gather(first, versions.now(), versions.now())
        assert asked == 3


class TestPromptMemory:
    def test_a_prompt_that_goes_on_is_parsed_from_there(self) -> None:
        memory = PromptMemory()
        assert memory.read("s", b"1,22,333").tolist() == [1, 22, 333]
        assert memory.read("s", b"1,22,333,4").tolist() == [1, 22, 333, 4]
        assert memory.read("s", b"1,22,333,4").tolist() == [1, 22, 333, 4]
        assert memory.read("s", b"1,22,333,45,6").tolist() == [1, 22, 333, 45, 6], "the last id may be longer than it was"
        assert memory.read("s", b"1,22").tolist() == [1, 22]
        assert memory.read("other", b"1,22,9").tolist() == [1, 22, 9]

    def test_another_prompt_of_the_same_length_is_not_taken_for_it(self) -> None:
        memory = PromptMemory()
        memory.read("s", b"1,22,333")
        assert memory.read("s", b"1,22,334,5").tolist() == [1, 22, 334, 5]

    def test_random_histories_read_as_json_would(self) -> None:
        memory, rng, prompt = PromptMemory(), np.random.default_rng(0), list[int]()
        for _ in range(300):
            cut = int(rng.integers(0, len(prompt) + 1)) if rng.random() < 0.3 else len(prompt)
            prompt = prompt[:cut] + rng.integers(0, 200_000, int(rng.integers(0, 9))).tolist()
            ids = memory.read("s", ",".join(map(str, prompt)).encode())
            assert ids.tolist() == prompt
            assert ids.dtype == np.int32

    def test_what_is_handed_out_cannot_be_changed(self) -> None:
        memory = PromptMemory()
        with pytest.raises(ValueError, match="read-only"):
            memory.read("s", b"1,2")[0] = 9

    @pytest.mark.parametrize("text", [b"1,,2", b"1,x", b"1.5", b"null", b"-1", b"1,2,", b'"1"'])
    def test_what_is_no_list_of_ids(self, text: bytes) -> None:
        with pytest.raises(msgspec.DecodeError, match="expected token ids"):
            PromptMemory().read("s", text)

    def test_the_sessions_that_were_silent_longest_are_forgotten(self) -> None:
        memory = PromptMemory(capacity=5)
        for session in ("a", "b", "a", "c"):
            memory.read(session, b"1,2")
        assert list(memory._seen) == ["a", "c"]
        assert memory._held == 4
