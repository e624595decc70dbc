"""vLLM's chat and completions routes on the real server, held against its token route.

Needs `make vllm`; run by `make test-all`.
"""

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import AsyncIterator
from itertools import pairwise

import numpy as np
import pytest
from msgspec import Raw

from polar.chat import ChatRequest, Message, TextPart, Tool
from polar.engines.protocol import Chatted, EngineInfo, Generated, ResolvedSampling
from polar.engines.vllm import VllmEngine
from polar.errors import CaptureError, EngineRefusal
from polar.specs import Float32Array, Int32Array, VersionSpan

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

GREEDY = ResolvedSampling(max_tokens=12, temperature=0.0, stop_token_ids=(2,))
LONG = ResolvedSampling(max_tokens=2000)
CITY = Raw(b'{"type":"object","properties":{"city":{"type":"string","enum":["Paris","Rome"]}},"required":["city"]}')
WEATHER = Tool("get_weather", "The weather in a city.", CITY)


@pytest.fixture
async def engine(vllm: str) -> AsyncIterator[VllmEngine]:
    made = VllmEngine(vllm)
    await made.info()
    yield made
    await made.close()


@pytest.fixture
async def older(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    """The same server as if it lacked the token route."""
    monkeypatch.setattr(engine, "_has_token_route", False)
    return engine


def asking(text: str = "What is the capital of France?", *, streamed: bool = True, choice: str = "") -> ChatRequest:
    tools = (WEATHER,) if choice else ()
    return ChatRequest("any", (Message("user", (TextPart(text),)),), tools, stream=streamed, tool_choice=choice or "auto")


PROMPT = np.array([1, 4093, 198], np.int32)
COUNT = "Count from one to a thousand, in words, and leave none out."


async def chat(engine: VllmEngine, request: ChatRequest, sampling: ResolvedSampling = GREEDY, id: str = "c") -> list[Chatted]:
    return [piece async for piece in engine.chat(id, request, sampling, session_id="s")]


async def generate(engine: VllmEngine, prompt: Int32Array, sampling: ResolvedSampling = GREEDY, id: str = "g") -> list[Generated]:
    return [piece async for piece in engine.generate(id, prompt, sampling)]


def joined(parts: list[Generated]) -> tuple[list[int], Float32Array]:
    ids = [token for part in parts for token in part.ids]
    return ids, np.array([value for part in parts for value in part.logprobs], np.float32)


def prompt_of(pieces: list[Chatted]) -> Int32Array:
    (prompt,) = [piece.prompt_ids for piece in pieces if piece.prompt_ids is not None]
    return prompt


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        found = re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)", answer.read().decode(), re.MULTILINE)
    assert found, name
    return float(found[1])


async def test_it_says_what_it_can(engine: VllmEngine) -> None:
    info = await engine.info()
    assert info == EngineInfo("policy", info.model_path, 4096, constrains=True, token_in=True, chats=True)


async def test_all_routes_sample_the_same_ids_with_the_same_log_probabilities(engine: VllmEngine, older: VllmEngine) -> None:
    streamed, whole = await chat(engine, asking()), await chat(engine, asking(streamed=False))
    completed = await generate(older, prompt_of(streamed))
    older._has_token_route = True
    generated = await generate(engine, prompt_of(streamed))
    ids, logprobs = joined(generated)
    assert ids[-1] == 2
    for parts in ([piece.tokens for piece in streamed], [piece.tokens for piece in whole], completed):
        assert joined(parts)[0] == ids
        assert np.abs(joined(parts)[1] - logprobs).max() < 1e-4
        assert parts[-1].usage == generated[-1].usage
        assert parts[-1].versions == generated[-1].versions
    assert len(whole) == 1
    assert prompt_of(whole).tolist() == prompt_of(streamed).tolist()
    assert streamed[-1].parsed == whole[0].parsed


async def test_a_prefill_scores_alike_on_both_token_routes(engine: VllmEngine, older: VllmEngine) -> None:
    text = await engine.tokenize("The quick brown fox jumps over the lazy dog.")
    completed = await older.score(text)
    older._has_token_route = True
    assert np.abs(await engine.score(text) - completed).max() < 1e-4


async def test_abort_stops_a_chat_at_once(engine: VllmEngine) -> None:
    told, sampled = 0.0, 0
    async for piece in engine.chat("aborted", asking(COUNT), LONG):
        sampled += len(piece.tokens.ids)
        if piece.tokens.ids and not told:
            told = time.monotonic()
            await engine.abort("aborted")
    assert time.monotonic() - told < 5.0, "50 to 100 ms where cores are free, for 2,000 tokens it takes minutes"
    assert piece.tokens.finish == "abort"
    assert piece.tokens.usage is not None
    assert piece.tokens.usage.completion_tokens == sampled


async def test_abort_stops_a_chat_that_nobody_reads_along(engine: VllmEngine) -> None:
    call = asyncio.ensure_future(chat(engine, asking(COUNT, streamed=False), LONG, "aborted"))
    await asyncio.sleep(1.0)
    await engine.abort("aborted")
    (whole,) = await call
    assert whole.tokens.finish == "abort"
    assert whole.tokens.usage is not None
    assert whole.tokens.usage.completion_tokens == len(whole.tokens.ids) == len(whole.tokens.logprobs)


async def test_abort_stops_a_completion_at_once(older: VllmEngine) -> None:
    async for part in older.generate("aborted", PROMPT, LONG):
        if part.finish is None:
            await older.abort("aborted")
    assert part.finish == "abort"


async def test_an_abort_before_the_first_token_ends_with_nothing(older: VllmEngine) -> None:
    await older.pause()
    completion = asyncio.ensure_future(generate(older, PROMPT, LONG, "g1"))
    reply = asyncio.ensure_future(chat(older, asking(), id="c1"))
    await asyncio.sleep(0.5)
    await asyncio.gather(older.abort("g1"), older.abort("c1"))
    await older.resume()
    for last in ((await completion)[-1], (await reply)[-1].tokens):
        assert (last.finish, last.ids, last.versions) == ("abort", (), ())


@pytest.mark.parametrize("choice", ["auto", "required", "get_weather"])
async def test_tool_choices_streamed_and_whole(engine: VllmEngine, choice: str) -> None:
    """The model calls no tools of itself; `auto` lets it talk, the others sample under a grammar of the server's."""
    sampling = ResolvedSampling(max_tokens=32, temperature=0.0, stop_token_ids=(2,))
    pieces = await chat(engine, asking("How is the weather?", choice=choice), sampling)
    (whole,) = await chat(engine, asking("How is the weather?", choice=choice, streamed=False), sampling)
    assert joined([piece.tokens for piece in pieces])[0] == list(whole.tokens.ids)
    usage = whole.tokens.usage
    assert usage is not None
    assert usage.completion_tokens == len(whole.tokens.ids)
    parsed = pieces[-1].parsed
    assert parsed is not None
    if choice == "auto":
        assert parsed == whole.parsed
        assert parsed.text
    elif whole.tokens.finish == "stop":
        assert parsed == whole.parsed
        ((name, arguments),) = parsed.tool_calls
        assert name == "get_weather"
        assert json.loads(arguments) is not None
    else:  # the grammar leaves strings as long as the model likes: cut, the whole reply is text, the streamed one a call
        assert "tool_parse_error" in parsed.findings


async def test_a_schema_binds_what_is_said(engine: VllmEngine) -> None:
    sampling = ResolvedSampling(max_tokens=60, json_schema=CITY)
    (whole,) = await chat(engine, asking(streamed=False), sampling)
    assert whole.parsed is not None
    assert json.loads(whole.parsed.text)["city"] in ("Paris", "Rome")


async def test_what_the_server_cannot_is_a_refusal(engine: VllmEngine) -> None:
    with pytest.raises(EngineRefusal, match="maximum context length is 4096 tokens"):
        await chat(engine, asking("word " * 5000))
    with pytest.raises(EngineRefusal, match="cannot be greater than max_model_len=4096"):
        await chat(engine, asking(), ResolvedSampling(max_tokens=5000))


async def test_a_prefix_is_reused_under_the_same_weights_only(engine: VllmEngine, vllm: str) -> None:
    prompt = np.random.default_rng(7).integers(100, 40_000, 600).astype(np.int32)
    hits = [metric(vllm, "prefix_cache_hits_total")]
    for version in (None, None, 3, None):
        if version is not None:
            await engine.update_version(version)
        await generate(engine, prompt, ResolvedSampling(max_tokens=1))
        await asyncio.sleep(0.5)  # the counters follow
        hits.append(metric(vllm, "prefix_cache_hits_total"))
    assert [later - earlier > 0 for earlier, later in pairwise(hits)] == [False, True, False, True]


async def test_new_weights_in_mid_reply_are_spans_on_the_token_route_and_refused_on_the_others(engine: VllmEngine) -> None:
    async def update(version: int) -> None:
        await engine.pause()
        await engine.update_version(version)
        await engine.resume()

    sampling = ResolvedSampling(max_tokens=16)
    async for part in engine.generate("spans", PROMPT, sampling):
        if part.finish is None:
            await update(11)
    assert part.versions[-1].policy_version == 11
    assert len(part.versions) == 2

    async def updated() -> None:
        async for _ in engine.chat("refused", asking(COUNT), sampling):
            await update(12)

    with pytest.raises(CaptureError, match="W01: the weights went from version 11 to 12"):
        await updated()
    assert (await chat(engine, asking(), GREEDY))[-1].tokens.versions == (VersionSpan(0, 8, 12),)
