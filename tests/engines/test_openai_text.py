"""Providers of Chat Completions that show text only, as they differ: against the scripted engine, and against their words."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from msgspec import Raw
from tokenizers import Tokenizer

from polar.chat import ChatRequest, Message, ReasoningDelta, RequestedSampling, TextDelta, TextPart, Tool, Usage
from polar.engines.openai_text import OpenAITextEngine
from polar.engines.protocol import Chatted, EngineInfo, ResolvedSampling
from polar.engines.scripted import Scripted, ScriptedEngine, scripted_server
from polar.errors import EngineError, EngineRefusal
from polar.tokens.rendering import ParsedReply
from tests.engines.servers import freed, ids, saying, stream

SAMPLING = ResolvedSampling(max_tokens=100, temperature=0.7, top_p=0.9)
BASH = Tool("bash", "Run a command.", Raw(b'{"type":"object"}'))
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
HOUR = 3600.0


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


def asking(streamed: bool = True, tools: tuple[Tool, ...] = ()) -> ChatRequest:
    messages = (Message("user", (TextPart("hi"),)), Message("assistant", (TextPart("ho"),), "Hm."))
    return ChatRequest("any", messages, tools, RequestedSampling(stop=("END",)), stream=streamed)


@asynccontextmanager
async def provider(url: str, key: str = "") -> AsyncIterator[OpenAITextEngine]:
    engine = OpenAITextEngine(url, "a-model", key, key_variable="THEIR_KEY")
    try:
        yield engine
    finally:
        await engine.close()


async def collect(engine: OpenAITextEngine, request: ChatRequest, sampling: ResolvedSampling = SAMPLING) -> list[Chatted]:
    return [piece async for piece in engine.chat("r1", request, sampling)]


def events(*bodies: dict[str, object]) -> bytes:
    return stream(*(b"data: " + json.dumps(body).encode() + b"\r\n\r\n" for body in bodies), b"data: [DONE]\r\n\r\n")


def delta(finish: str | None = None, **said: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": said, "finish_reason": finish}]}


def status(code: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (code.encode(), len(body), body)


@pytest.mark.parametrize("streamed", [True, False])
async def test_text_calls_and_usage_without_ids(tokenizer: Tokenizer, streamed: bool) -> None:
    scripted = ScriptedEngine(tokenizer, lambda call: Scripted(f"Listing.\n{CALL}"))
    async with scripted_server(scripted) as url, provider(f"{url}/v1/") as engine:
        pieces = await collect(engine, asking(streamed, (BASH,)))
    last, entry = pieces[-1], scripted.log[0]
    assert last.parsed == ParsedReply("Listing.\n", "", (("bash", '{"command": "ls"}'),))
    assert (last.tokens.finish, last.tokens.usage) == ("stop", Usage(len(entry.prompt_ids), len(entry.ids)))
    assert all(not piece.tokens.ids and not piece.tokens.logprobs and piece.prompt_ids is None for piece in pieces)
    assert "".join(delta.text for piece in pieces for delta in piece.deltas) == "Listing.\n"


async def test_a_hang_up_stops_the_provider(tokenizer: Tokenizer) -> None:
    scripted = ScriptedEngine(tokenizer, lambda call: Scripted("a b c d", hold_before_end=HOUR))
    async with scripted_server(scripted) as url, provider(f"{url}/v1") as engine:
        async with aclosing(engine.chat("r1", asking(), SAMPLING)) as pieces:
            await anext(pieces)
        assert (await freed(scripted)).finish == "abort"


async def test_the_request_asks_for_no_ids_and_pins_what_all_providers_know() -> None:
    async with saying(events(delta("stop", content="ok"))) as (url, requests), provider(f"{url}/v1", "the-key") as engine:
        await collect(engine, asking(tools=(BASH,)), ResolvedSampling(50, json_schema=Raw(b'{"type":"object"}')))
    head, _, body = requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions ")
    assert b"Authorization: Bearer the-key" in head
    assert json.loads(body) == {
        "model": "a-model",
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "reasoning_content": "Hm."}],
        "max_tokens": 50,
        "temperature": 1.0,
        "top_p": 1.0,
        "stop": ["END"],
        "tools": [
            {"type": "function", "function": {"name": "bash", "description": "Run a command.", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": {"type": "object"}}},
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_reasoning_under_either_name_and_no_usage(field: str) -> None:
    said = [delta(**{field: "Hm"}), delta(**{field: "."}), delta(content="Yes."), delta("stop", content="")]
    async with saying(events(*said)) as (url, _), provider(url) as engine:
        pieces = await collect(engine, asking())
    assert [each for piece in pieces for each in piece.deltas] == [ReasoningDelta("Hm"), ReasoningDelta("."), TextDelta("Yes.")]
    assert pieces[-1].parsed == ParsedReply("Yes.", "Hm.", ())
    assert pieces[-1].tokens.usage is None


async def test_calls_in_pieces_whole_without_an_index_and_side_by_side() -> None:
    def call(**said: object) -> dict[str, object]:
        return delta(tool_calls=[said])

    said = [
        call(index=0, id="c0", function={"name": "one", "arguments": ""}),
        call(index=1, id="c1", function={"name": "two", "arguments": '{"b"'}),
        call(index=0, function={"arguments": '{"a": 1}'}),
        call(index=1, function={"arguments": ": 2}"}),
        delta("tool_calls"),
    ]
    async with saying(events(*said)) as (url, _), provider(url) as engine:
        parsed = (await collect(engine, asking()))[-1].parsed
    assert parsed == ParsedReply("", "", (("one", '{"a": 1}'), ("two", '{"b": 2}')))
    said = [call(function={"name": name, "arguments": "{}"}) for name in ("one", "two")]
    async with saying(events(*said, delta("stop"))) as (url, _), provider(url) as engine:
        parsed = (await collect(engine, asking()))[-1].parsed
    assert parsed == ParsedReply("", "", (("one", "{}"), ("two", "{}")))


async def test_a_call_cut_short_has_a_finding() -> None:
    cut = delta("length", tool_calls=[{"index": 0, "function": {"name": "one", "arguments": '{"a'}}])
    async with saying(events(cut)) as (url, _), provider(url) as engine:
        last = (await collect(engine, asking()))[-1]
    assert last.tokens.finish == "length"
    assert last.parsed == ParsedReply("", "", (("one", '{"a'),), ("tool_parse_error",))


async def test_comments_between_events_keep_the_connection_alive_and_mean_nothing() -> None:
    body = b': OPENROUTER PROCESSING\n\nevent: x\ndata: {"choices":[{"delta":{"content":"ok"},"finish_reason":"stop"}]}\n\n'
    async with saying(stream(body)) as (url, _), provider(url) as engine:
        assert (await collect(engine, asking()))[-1].parsed == ParsedReply("ok", "", ())


@pytest.mark.parametrize(
    ("answer", "kind", "match"),
    [
        (status("429 Too Many Requests", b'{"error":{"message":"slow down"}}'), EngineError, "with 429: slow down"),
        (status("503 Service Unavailable", b"<html>busy</html>"), EngineError, "with 503: <html>busy</html>"),
        (status("401 Unauthorized", b'{"error":{"message":"no"}}'), EngineError, "with 401: no; set THEIR_KEY to the key"),
        (status("400 Bad Request", b'{"error":{"message":"bad tools"}}'), EngineRefusal, "with 400: bad tools"),
        (status("422 Unprocessable Entity", b'{"error":"bad tools"}'), EngineRefusal, "with 422: bad tools"),
        (events({"error": {"message": "upstream died", "code": 502}}), EngineError, "mid-stream: upstream died"),
        (events(delta(content="half a")), EngineError, "without a finish reason"),
        (stream(b"data: <html>\n\n"), EngineError, "sent what its kind would not"),
    ],
)
async def test_faults(answer: bytes, kind: type[EngineError], match: str) -> None:
    async with saying(answer) as (url, _), provider(url) as engine:
        with pytest.raises(kind, match=match) as caught:
            await collect(engine, asking())
    assert isinstance(caught.value, EngineRefusal) == (kind is EngineRefusal), "a refusal is not to be tried again"


@pytest.mark.parametrize("field", ["stream_options", "max_tokens"])
async def test_a_field_that_the_provider_refuses_by_name_is_done_without(field: str) -> None:
    refusal = status("400 Bad Request", json.dumps({"error": {"message": f"Unsupported parameter: '{field}'"}}).encode())
    async with saying(refusal) as (url, requests), provider(url) as engine:
        with pytest.raises(EngineRefusal, match=field):
            await collect(engine, asking())
    first, second = (json.loads(request.partition(b"\r\n\r\n")[2]) for request in requests)
    assert field in first
    assert field not in second
    assert field == "stream_options" or second["max_completion_tokens"] == 100


async def test_a_field_that_is_refused_for_its_value_is_asked_again_with_the_next_request() -> None:
    refusal = status("400 Bad Request", b'{"error":{"message":"max_tokens is too large: 100"}}')
    async with saying(refusal) as (url, requests), provider(url) as engine:
        for _ in range(2):
            with pytest.raises(EngineRefusal, match="too large"):
                await collect(engine, asking())
    asked = [json.loads(request.partition(b"\r\n\r\n")[2]) for request in requests]
    assert ["max_tokens" in body for body in asked] == [True, False, True, False]


async def test_what_it_is_and_what_it_cannot() -> None:
    models = b'{"data":[{"id":"other","context_length":5},{"id":"a-model","context_length":64000}]}'
    expected = EngineInfo("a-model", "", 64_000, True, token_in=False, chats=True, shows_ids=False, scores=False)
    async with saying(stream(models)) as (url, _), provider(url) as engine:
        assert await engine.info() == expected
        with pytest.raises(EngineRefusal, match="cannot generate from ids"):
            engine.generate("r1", ids(1), SAMPLING)
        with pytest.raises(EngineRefusal, match="cannot tell ids"):
            await engine.tokenize("x")
        with pytest.raises(EngineRefusal, match="cannot score"):
            await engine.score(ids(1, 2))
        with pytest.raises(EngineRefusal, match="regular expression"):
            await collect(engine, asking(), ResolvedSampling(5, regex="a+"))


async def test_a_provider_without_a_list_of_models() -> None:
    async with saying(status("404 Not Found", b"")) as (url, _), provider(url) as engine:
        assert (await engine.info()).max_model_len == 128_000
