"""Generation from ids on `/v1/completions`, for servers without the token route; and what tells the versions apart (W02)."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from msgspec import Raw
from tokenizers import Tokenizer

from polar.chat import ChatRequest, Message, TextPart, Usage
from polar.engines.protocol import EngineInfo, Generated, ResolvedSampling
from polar.engines.script import Fault
from polar.engines.scripted import Scripted, ScriptedEngine
from polar.engines.vllm import VllmEngine
from polar.engines.vllm_completions import completion_body
from polar.engines.vllm_wire import TokenStream
from polar.errors import CaptureError, EngineError
from polar.specs import VersionSpan
from tests.engines.servers import freed, ids, joined, logged, serving

TEXT = "The quick brown fox jumps over the lazy dog, and then it rests."
SAMPLING = ResolvedSampling(max_tokens=1000, stop_token_ids=(2,))
TOKEN_ROUTES = ("/inference/v1/generate", "/inference/v1/abort_requests")
HOUR = 3600.0


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


@asynccontextmanager
async def older(tokenizer: Tokenizer, script: Scripted, *without: str) -> AsyncIterator[tuple[VllmEngine, ScriptedEngine]]:
    """A server without the token route, of which the client was told by `info`."""
    scripted = ScriptedEngine(tokenizer, lambda call: script, without=(*TOKEN_ROUTES, *without))
    async with serving(scripted) as engine:
        await engine.info()
        yield engine, scripted


async def collect(engine: VllmEngine) -> list[Generated]:
    return [part async for part in engine.generate("r1", ids(5, 6), SAMPLING)]


async def test_what_arrives_is_what_was_sampled(tokenizer: Tokenizer) -> None:
    async with older(tokenizer, Scripted(TEXT)) as (engine, scripted):
        parts = await collect(engine)
    (entry,) = scripted.log
    assert joined(parts) == (entry.ids, entry.logprobs)
    assert entry.prompt_ids == (5, 6)
    last = parts[-1]
    assert (last.finish, last.usage) == ("stop", Usage(2, len(entry.ids)))
    assert last.versions == (VersionSpan(0, len(entry.ids), 0),)


def test_a_recorded_reply() -> None:
    """vLLM 0.32, a whole reply read as the one event of a stream."""
    body = (Path(__file__).parent / "samples/vllm_completions_tokens_in.json").read_bytes()
    stream = TokenStream()
    stream.feed(b"data: " + body + b"\n\ndata: [DONE]\n\n")
    last = stream.end()
    assert last.ids == (504, 3575, 282, 4649, 314, 7042, 30, 2)
    assert last.logprobs[0] == -0.6501032114028931
    assert (last.finish, last.usage, stream.sampled) == ("stop", Usage(16, 8), 8)


def test_the_request_pins_every_sampling_parameter() -> None:
    sampling = ResolvedSampling(max_tokens=9, temperature=0.5, stop_token_ids=(2,), json_schema=Raw(b"{}"))
    assert json.loads(completion_body("r1", Raw(b"[5,6]"), sampling, "7")) == {
        "prompt": [5, 6],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "return_token_ids": True,
        "logprobs": 0,
        "stop_token_ids": [2],
        "structured_outputs": {"json": {}},
        "request_id": "r1",
        "cache_salt": "7",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_the_route_is_chosen_by_what_the_server_has(tokenizer: Tokenizer) -> None:
    async def told(*without: str) -> EngineInfo:
        async with serving(ScriptedEngine(tokenizer, lambda call: Scripted("ok"), without=without)) as engine:
            return await engine.info()

    assert (await told()).token_in
    assert (await told("/inference/v1/generate")).token_in
    assert not (await told("/inference/v1/generate", "/v1/completions")).token_in
    assert (await told("/v1/completions")).chats
    assert not (await told("/v1/chat/completions")).chats


async def test_prefill_finds_the_logprobs_that_were_sampled(tokenizer: Tokenizer) -> None:
    async with older(tokenizer, Scripted(TEXT)) as (engine, _):
        sampled, logprobs = joined(await collect(engine))
        assert (await engine.score(ids(5, 6, *sampled)))[1:].tolist() == logprobs


@pytest.mark.parametrize(
    ("fault", "match"),
    [("missing_logprob", "T08: the engine sent 1 token ids with 0"), ("die", "broke off"), ("http_500", "500")],
)
async def test_faults(tokenizer: Tokenizer, fault: Fault, match: str) -> None:
    async with older(tokenizer, Scripted(TEXT, fault=fault)) as (engine, _):
        with pytest.raises(EngineError, match=match):
            await collect(engine)


async def test_a_null_logprob_is_nan_for_the_detector(tokenizer: Tokenizer) -> None:
    async with older(tokenizer, Scripted(TEXT, fault="nan_logprob")) as (engine, _):
        assert math.isnan(joined(await collect(engine))[1][0])


async def test_abort_ends_the_stream_with_what_was_sampled(tokenizer: Tokenizer) -> None:
    async with older(tokenizer, Scripted(TEXT, hold_before_end=HOUR)) as (engine, scripted):
        call = asyncio.ensure_future(collect(engine))
        await logged(scripted, 11)
        await engine.abort("r1")
        parts = await call
        assert [control.path for control in scripted.controls] == ["/abort_requests"]
    assert parts[-1].finish == "abort"
    assert joined(parts)[0] == scripted.log[0].ids


async def test_a_closed_generator_stops_a_server_that_has_no_route_for_it(tokenizer: Tokenizer) -> None:
    async with older(tokenizer, Scripted(TEXT, hold_before_end=HOUR), "/abort_requests") as (engine, scripted):
        async with aclosing(engine.generate("r1", ids(5), SAMPLING)) as parts:
            await anext(parts)
        assert (await freed(scripted)).finish == "abort"


async def test_new_weights_in_mid_generation_are_refused_by_name(tokenizer: Tokenizer) -> None:
    async with older(tokenizer, Scripted(TEXT, delay_per_token=0.002)) as (engine, scripted):
        call = asyncio.ensure_future(collect(engine))
        await logged(scripted, 4)
        await engine.update_version(7)
        with pytest.raises(CaptureError, match="W01: the weights went from version 0 to 7"):
            await call


async def test_a_server_too_old_for_versions_has_the_one_that_this_client_named(tokenizer: Tokenizer) -> None:
    async with older(tokenizer, Scripted("ok"), "/weight_info", "/update_weight_version") as (engine, _):
        assert (await collect(engine))[-1].versions[0].policy_version == 0
        await engine.update_version(3)
        assert (await collect(engine))[-1].versions[0].policy_version == 3


class TestCacheSalt:
    """Prefixes that old weights computed are not reused (W02): a request is salted with the version that the server named."""

    async def test_each_request_is_salted_with_the_version_at_its_time(self, tokenizer: Tokenizer) -> None:
        scripted = ScriptedEngine(tokenizer, lambda call: Scripted("ok"))
        request = ChatRequest("any", (Message("user", (TextPart("hi"),)),))
        async with serving(scripted) as engine:
            await collect(engine)  # nobody has asked for the version
            await engine.info()
            await collect(engine)
            await engine.update_version(7)
            await collect(engine)
            scripted.version = "9"
            await collect(engine)  # whose spans tell of another's update
            await collect(engine)
            [_ async for _ in engine.chat("r1", request, SAMPLING)]
        assert [entry.cache_salt for entry in scripted.log] == ["", "0", "7", "7", "9", "9"]

    async def test_a_server_that_names_no_versions_gets_no_salt(self, tokenizer: Tokenizer) -> None:
        async with older(tokenizer, Scripted("ok"), "/weight_info") as (engine, scripted):
            await engine.update_version(7)
            await collect(engine)
        assert [entry.cache_salt for entry in scripted.log] == [""]
