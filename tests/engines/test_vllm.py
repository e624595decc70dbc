"""The client of vLLM's token route, against the scripted engine and against bytes as vLLM 0.32 sends them."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from polar.chat import Usage
from polar.engines.protocol import Engine, EngineInfo, Generated, ResolvedSampling
from polar.engines.scripted import Control, Scripted, ScriptedEngine, scripted_server
from polar.engines.vllm import VllmEngine
from polar.errors import EngineError
from polar.specs import Int32Array, VersionSpan
from tests.engines.servers import client_of, freed, ids, joined, logged, replaying, serving, stream

TEXT = "The quick brown fox jumps over the lazy dog, and then it rests."
SAMPLING = ResolvedSampling(max_tokens=1000, stop_token_ids=(2,))
HOUR = 3600.0

# Two tokens under two weights, as vLLM 0.32 streams them (`top_logprobs` shortened).
RECORDED = b"""\
data: {"request_id":"generate-tokens-r1","usage":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":null,\
"stop_reason":null,"token_ids":[504],"routed_experts":null,"sampling_mask":null,"weight_versions":null,"logprobs":{"content":\
[{"token_id":504,"logprob":-0.5814982056617737,"rank":1,"top_logprobs":[{"token_id":9,"logprob":-9.0,"rank":1}]}]}}]}

data: {"request_id":"generate-tokens-r1","usage":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":"length",\
"stop_reason":null,"token_ids":[7042],"routed_experts":null,"sampling_mask":null,"weight_versions":[{"version":"default",\
"start":0,"end":1},{"version":"v7","start":1,"end":2}],"logprobs":{"content":[{"token_id":7042,"logprob":-2.5,"rank":3,\
"top_logprobs":[]}]}}]}

data: {"request_id":"generate-tokens-r1","usage":{"prompt_tokens":16,"total_tokens":18,"completion_tokens":2},\
"output_mode":"tokens","choices":[]}

data: [DONE]

"""


@pytest.fixture(scope="module")
def model_dir(smollm2_dir: Path) -> Path:
    return smollm2_dir


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


async def collect(engine: Engine, request_id: str = "r1", prompt: Int32Array | None = None) -> list[Generated]:
    return [part async for part in engine.generate(request_id, ids(5, 6) if prompt is None else prompt, SAMPLING)]


class TestGenerate:
    async def test_what_arrives_is_what_was_sampled(self, tokenizer: Tokenizer) -> None:
        scripted = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT))
        async with serving(scripted) as engine:
            parts = await collect(engine)
        assert joined(parts) == (scripted.log[0].ids, scripted.log[0].logprobs)
        assert scripted.log[0].prompt_ids == (5, 6)

    async def test_only_the_last_part_has_finish_versions_and_usage(self, tokenizer: Tokenizer) -> None:
        scripted = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT, delay_per_token=0.002))
        async with serving(scripted) as engine:
            *parts, last = await collect(engine)
        total = len(scripted.log[0].ids)
        assert parts
        assert all(part.ids and part.finish is None and part.usage is None and not part.versions for part in parts)
        assert (last.finish, last.usage, last.versions) == ("stop", Usage(2, total), (VersionSpan(0, total, 0),))

    async def test_tokens_come_as_they_are_sampled_and_the_finish_waits_for_the_usage(self, tokenizer: Tokenizer) -> None:
        end = asyncio.Event()
        scripted = ScriptedEngine(tokenizer, lambda call: Scripted("ab", hold_before_end=end))
        async with serving(scripted) as engine, aclosing(engine.generate("r1", ids(5), SAMPLING)) as parts:
            seen: list[int] = []
            while len(seen) < 3:
                seen += (await anext(parts)).ids
            end.set()
            assert [part async for part in parts] == [Generated((), (), "stop", (VersionSpan(0, 3, 0),), Usage(1, 3))]

    async def test_vllms_own_bytes_read_the_same_wherever_tcp_cuts_them(self) -> None:
        whole = stream(RECORDED)
        for cut in range(len(whole) - len(RECORDED), len(whole), 97):
            async with replaying(whole[:cut], whole[cut:], pause=0.001) as (engine, _):
                parts = await collect(engine)
            assert joined(parts) == ([504, 7042], [-0.5814982056617737, -2.5])
            assert (parts[-1].finish, parts[-1].usage) == ("length", Usage(16, 2))
            assert parts[-1].versions == (VersionSpan(0, 1, 0), VersionSpan(1, 2, 7))

    async def test_events_of_one_read_are_one_part(self) -> None:
        token = RECORDED.split(b"\n\n")[0] + b"\n\n"
        async with replaying(stream(token * 3, RECORDED)[:-400], stream(token * 3, RECORDED)[-400:], pause=0.05) as (engine, _):
            parts = await collect(engine)
        assert [len(part.ids) for part in parts] == [4, 1]

    async def test_the_request_says_everything_and_leaves_nothing_to_the_models_defaults(self) -> None:
        async with replaying(stream(RECORDED)) as (engine, requests):
            await collect(engine, prompt=ids(0, 9, 49_151, 151_668))
        assert json.loads(requests[0].split(b"\r\n\r\n")[1]) == {
            "request_id": "r1",
            "token_ids": [0, 9, 49_151, 151_668],
            "sampling_params": {
                "max_tokens": 1000,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "logprobs": 0,
                "stop_token_ids": [2],
            },
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert b"x-request-id" not in requests[0].lower(), "vLLM would take it for the request id, and aborts would miss"

    async def test_calls_share_connections(self, tokenizer: Tokenizer) -> None:
        scripted = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT))
        async with serving(scripted) as engine:
            for number in range(3):
                await collect(engine, f"r{number}")
            assert len(engine._server._origin.open) == 1

    async def test_a_hundred_generations_run_at_once(self, tokenizer: Tokenizer) -> None:
        scripted = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT, delay_per_token=0.001))
        async with serving(scripted) as engine:
            replies = await asyncio.gather(*(collect(engine, f"r{number}") for number in range(100)))
        truth = {entry.request_id: (entry.ids, entry.logprobs) for entry in scripted.log}
        assert {f"r{number}": joined(parts) for number, parts in enumerate(replies)} == truth


class TestClosing:
    async def test_a_closed_generator_aborts_on_the_server(self, tokenizer: Tokenizer) -> None:
        scripted = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT, hold_before_end=HOUR))
        async with serving(scripted) as engine:
            async with aclosing(engine.generate("r1", ids(5), SAMPLING)) as parts:
                await anext(parts)
            entry = await freed(scripted)
        assert entry.finish == "abort"
        body = '{"request_ids":["generate-tokens-r1"]}'
        assert scripted.controls == [Control("/inference/v1/abort_requests", body)]

    async def test_a_cancelled_task_aborts_on_the_server(self, tokenizer: Tokenizer) -> None:
        scripted = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT, hold_before_end=HOUR))
        async with serving(scripted) as engine:
            call = asyncio.ensure_future(collect(engine))
            await logged(scripted, 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (await freed(scripted)).finish == "abort"

    async def test_closing_does_not_wait_for_an_engine_that_hangs(self) -> None:
        token = RECORDED.split(b"\n\n")[0] + b"\n\n"
        async with replaying(stream(token, RECORDED)[: -len(RECORDED)], pause=HOUR) as (engine, requests):
            parts = engine.generate("r1", ids(5), SAMPLING)
            await anext(parts)
            async with asyncio.timeout(1.0):
                await parts.aclose()
            async with asyncio.timeout(4.0):
                await engine.close()
        assert requests[1].startswith(b"POST /inference/v1/abort_requests")

    async def test_a_generation_that_ended_is_not_aborted(self, tokenizer: Tokenizer) -> None:
        scripted = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT))
        async with serving(scripted) as engine:
            await collect(engine)
        assert scripted.controls == []

    async def test_abort_ends_the_stream_with_what_was_sampled(self, tokenizer: Tokenizer) -> None:
        scripted = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT, hold_before_end=HOUR))
        async with serving(scripted) as engine:
            call = asyncio.ensure_future(collect(engine))
            await logged(scripted, 11)
            await engine.abort("r1")
            parts = await call
        assert parts[-1].finish == "abort"
        assert joined(parts)[0] == scripted.log[0].ids
        assert parts[-1].versions == (VersionSpan(0, len(scripted.log[0].ids), 0),)


class TestFaults:
    async def test_a_missing_logprob_is_refused_by_name(self, tokenizer: Tokenizer) -> None:
        async with serving(ScriptedEngine(tokenizer, lambda call: Scripted(TEXT, fault="missing_logprob"))) as engine:
            with pytest.raises(EngineError, match="T08"):
                await collect(engine)

    async def test_logprobs_of_other_tokens_are_refused_by_name(self) -> None:
        async with replaying(stream(RECORDED.replace(b'"token_id":504', b'"token_id":505'))) as (engine, _):
            with pytest.raises(EngineError, match=r"T08.*\[504\].*\[505\]"):
                await collect(engine)

    async def test_a_null_logprob_is_nan_for_the_detector(self, tokenizer: Tokenizer) -> None:
        async with serving(ScriptedEngine(tokenizer, lambda call: Scripted(TEXT, fault="nan_logprob"))) as engine:
            _, logprobs = joined(await collect(engine))
        assert [math.isnan(value) for value in logprobs].index(True) == 0

    async def test_a_sentinel_a_wrong_usage_and_a_version_gap_reach_the_detectors(self, tokenizer: Tokenizer) -> None:
        async with serving(ScriptedEngine(tokenizer, lambda call: Scripted("ab", fault="sentinel_logprob"))) as engine:
            assert joined(await collect(engine))[1][0] == -9999.0
        async with serving(ScriptedEngine(tokenizer, lambda call: Scripted("ab", fault="usage_off_by_one"))) as engine:
            assert (await collect(engine))[-1].usage == Usage(2, 4)
        async with serving(ScriptedEngine(tokenizer, lambda call: Scripted("ab", fault="version_gap"))) as engine:
            assert (await collect(engine))[-1].versions == (VersionSpan(1, 3, 0),)

    async def test_an_engine_that_dies_in_mid_stream(self, tokenizer: Tokenizer) -> None:
        async with serving(ScriptedEngine(tokenizer, lambda call: Scripted(TEXT, fault="die"))) as engine:
            with pytest.raises(EngineError, match="broke off"):
                await collect(engine)

    async def test_a_stream_without_a_finish(self) -> None:
        async with replaying(stream(RECORDED.split(b"\n\n")[0], b"\n\ndata: [DONE]\n\n")) as (engine, _):
            with pytest.raises(EngineError, match="without a finish reason"):
                await collect(engine)

    async def test_an_error_event_in_mid_stream(self) -> None:
        error = b'data: {"error":{"message":"out of memory","type":"InternalServerError","param":null,"code":500}}\n\n'
        async with replaying(stream(RECORDED.split(b"\n\n")[0], b"\n\n", error)) as (engine, _):
            with pytest.raises(EngineError, match="out of memory"):
                await collect(engine)

    async def test_what_is_not_vllm(self) -> None:
        async with replaying(stream(b"data: <html>\n\n")) as (engine, _):
            with pytest.raises(EngineError, match="sent what its kind would not"):
                await collect(engine)

    async def test_http_500_carries_the_servers_message(self, tokenizer: Tokenizer) -> None:
        async with serving(ScriptedEngine(tokenizer, lambda call: Scripted(TEXT, fault="http_500"))) as engine:
            with pytest.raises(EngineError, match="/inference/v1/generate with 500: scripted fault"):
                await collect(engine)

    async def test_a_prompt_beyond_the_context_carries_the_servers_message(self, tokenizer: Tokenizer) -> None:
        scripted = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT), max_model_len=8)
        async with serving(scripted) as engine:
            with pytest.raises(EngineError, match="400: This model's maximum context length is 8 tokens"):
                await collect(engine, prompt=ids(*range(9)))

    async def test_nobody_listens(self) -> None:
        async with client_of("http://127.0.0.1:9") as engine:
            with pytest.raises(EngineError, match=r"no engine answers at http://127\.0\.0\.1:9: is it running\?"):
                await collect(engine)
            with pytest.raises(EngineError, match="is it running"):
                await engine.info()

    @pytest.mark.parametrize(("name", "version"), [("default", 0), ("7", 7), ("v7", 7), ("007", 7)])
    async def test_versions_are_numbers(self, name: str, version: int) -> None:
        async with replaying(stream(RECORDED.replace(b'"v7"', f'"{name}"'.encode()))) as (engine, _):
            assert (await collect(engine))[-1].versions[1] == VersionSpan(1, 2, version)

    @pytest.mark.parametrize("name", ["latest", "step-7", "v7.1", "-1", ""])
    async def test_other_version_names_are_refused_with_advice(self, name: str) -> None:
        async with replaying(stream(RECORDED.replace(b'"v7"', f'"{name}"'.encode()))) as (engine, _):
            with pytest.raises(EngineError, match=r"name versions by number \('7' or 'v7'\)"):
                await collect(engine)


class TestInfo:
    async def test_model_tokenizer_directory_and_context(self, tokenizer: Tokenizer, model_dir: Path) -> None:
        scripted = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT), model_dir=model_dir, max_model_len=8192)
        async with serving(scripted) as engine:
            assert await engine.info() == EngineInfo("scripted", str(model_dir), 8192, chats=True)

    async def test_an_adapter_is_not_taken_for_the_model(self) -> None:
        models = (
            b'{"data":[{"id":"lora1","root":"/adapters/1","parent":"base","max_model_len":null},'
            b'{"id":"base","root":"/models/base","parent":null,"max_model_len":2048}]}'
        )
        async with replaying(stream(models)) as (engine, _):
            assert await engine.info() == EngineInfo("base", "/models/base", 2048, chats=True)


EVERY_CALL: list[Callable[[VllmEngine], Awaitable[object]]] = [
    collect,
    lambda engine: engine.abort("r1"),
    lambda engine: engine.info(),
    lambda engine: engine.score(ids(5, 6)),
    lambda engine: engine.pause(),
    lambda engine: engine.resume(),
    lambda engine: engine.reload_weights("/weights/7"),
    lambda engine: engine.update_version(7),
    lambda engine: engine.reset_prefix_cache(),
]


class TestKey:
    @pytest.mark.parametrize("call", EVERY_CALL)
    async def test_every_request_brings_the_key(
        self, tokenizer: Tokenizer, call: Callable[[VllmEngine], Awaitable[object]]
    ) -> None:
        guarded = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT), key="the-key")
        async with scripted_server(guarded) as url, client_of(url, "the-key") as engine:
            await call(engine)

    @pytest.mark.parametrize("call", EVERY_CALL)
    @pytest.mark.parametrize("key", ["", "another-key"])
    async def test_a_missing_or_wrong_key_is_an_error_that_names_the_variable(
        self, tokenizer: Tokenizer, call: Callable[[VllmEngine], Awaitable[object]], key: str
    ) -> None:
        guarded = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT), key="the-key")
        async with scripted_server(guarded) as url, client_of(url, key) as engine:
            with pytest.raises(EngineError, match="with 401: .*; set POLAR_ENGINE_KEY to the key"):
                await call(engine)
        assert guarded.log == []
        assert guarded.controls == []

    async def test_vllms_own_refusal_reads_the_same(self) -> None:
        body = b'{"error":"Unauthorized"}'
        head = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: %d\r\n\r\n" % len(body)
        async with replaying(head + body) as (engine, _):
            with pytest.raises(EngineError, match="/v1/models with 401: Unauthorized; set POLAR_ENGINE_KEY to the key"):
                await engine.info()

    async def test_no_header_without_a_key(self) -> None:
        async with replaying(stream(RECORDED)) as (engine, requests):
            await collect(engine)
        assert b"authorization" not in requests[0].lower()

    async def test_no_error_shows_the_key(self) -> None:
        async with replaying(b"SSH-2.0-OpenSSH_9.2\r\n", key="the-key") as (engine, requests):
            with pytest.raises(EngineError, match="broke off") as caught:
                await engine.info()
        assert b"the-key" in requests[0]
        assert "the-key" not in str(caught.value)


class TestScore:
    async def test_prefill_finds_the_logprobs_that_were_sampled(self, tokenizer: Tokenizer) -> None:
        scripted = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT))
        async with serving(scripted) as engine:
            sampled, logprobs = joined(await collect(engine))
            scores = await engine.score(ids(5, 6, *sampled))
        assert scores.dtype == np.float32
        assert scores[1:].tolist() == logprobs

    @pytest.mark.parametrize(
        "entries",
        [b"null", b'[null,{"6":{"logprob":-1}}]', b'[null,{"6":{"logprob":-1}},{"8":{"logprob":-1}}]', b"[null,null,null]"],
    )
    async def test_a_missing_score_is_refused_by_name(self, entries: bytes) -> None:
        async with replaying(stream(b'{"choices":[],"prompt_logprobs":', entries, b"}")) as (engine, _):
            with pytest.raises(EngineError, match="T08"):
                await engine.score(ids(5, 6, 7))


class TestWeights:
    @pytest.mark.parametrize(
        ("control", "recorded"),
        [
            (lambda engine: engine.pause(), Control("/pause?mode=keep", "")),
            (lambda engine: engine.resume(), Control("/resume", "")),
            (
                lambda engine: engine.reload_weights("/weights/7"),
                Control("/collective_rpc", '{"method":"reload_weights","kwargs":{"weights_path":"/weights/7"}}'),
            ),
            (lambda engine: engine.update_version(7), Control("/update_weight_version", '{"new_version":"7"}')),
            (lambda engine: engine.reset_prefix_cache(), Control("/reset_prefix_cache", "")),
        ],
    )
    async def test_each_control_is_vllms_route(
        self, tokenizer: Tokenizer, control: Callable[[VllmEngine], Awaitable[None]], recorded: Control
    ) -> None:
        scripted = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT))
        async with serving(scripted) as engine:
            await control(engine)
        assert scripted.controls == [recorded]

    async def test_an_update_in_mid_generation_keeps_both_versions(self, tokenizer: Tokenizer) -> None:
        scripted = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT, delay_per_token=0.002))
        async with serving(scripted) as engine:
            call = asyncio.ensure_future(collect(engine))
            await logged(scripted, 4)
            await engine.pause()
            await engine.reload_weights("/weights/7")
            await engine.update_version(7)
            await engine.resume()
            parts = await call
        before, total = scripted.log[0].versions.count("default"), len(scripted.log[0].versions)
        assert parts[-1].versions == (VersionSpan(0, before, 0), VersionSpan(before, total, 7))

    async def test_a_prefix_cache_that_was_kept_is_an_error(self) -> None:
        async with replaying(stream(b'{"success":false}')) as (engine, _):
            with pytest.raises(EngineError, match="did not reset its prefix cache"):
                await engine.reset_prefix_cache()
