"""The client of SGLang's own route, against a small server that speaks as SGLang 0.5.23 does by its source.

SGLang needs a GPU and does not run here: what these tests promise holds as far as that source was read rightly.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from polar.chat import Usage
from polar.engines.protocol import EngineInfo, Generated, ResolvedSampling
from polar.engines.sglang import SglangEngine
from polar.errors import EngineError, EngineRefusal
from polar.specs import Int32Array, VersionSpan
from tests.engines.sglang_server import SglangLike, Token, sglang_server

TOKENS: list[Token] = [(504, -0.5), (7042, -2.5), (30, -0.25), (2, -0.125)]
SAMPLING = ResolvedSampling(max_tokens=64, temperature=0.5, top_p=0.9, stop_token_ids=(2,))
WHOLE = ([504, 7042, 30, 2], [-0.5, -2.5, -0.25, -0.125])


def ids(*values: int) -> Int32Array:
    return np.array(values, np.int32)


@asynccontextmanager
async def client_of(server: SglangLike, key: str = "") -> AsyncIterator[SglangEngine]:
    async with sglang_server(server) as url:
        engine = SglangEngine(url, key)
        try:
            yield engine
        finally:
            await engine.close()


async def collect(engine: SglangEngine, sampling: ResolvedSampling = SAMPLING) -> list[Generated]:
    return [part async for part in engine.generate("r1", ids(5, 6), sampling)]


def joined(parts: list[Generated]) -> tuple[list[int], list[float]]:
    return [token for part in parts for token in part.ids], [value for part in parts for value in part.logprobs]


async def of(server: SglangLike) -> list[Generated]:
    async with client_of(server) as engine:
        return await collect(engine)


class TestGenerate:
    @pytest.mark.parametrize(("incremental", "cumulative_logprobs"), [(False, False), (True, False), (True, True)])
    async def test_all_until_now_and_only_what_is_new_read_the_same(self, incremental: bool, cumulative_logprobs: bool) -> None:
        *parts, last = await of(SglangLike(TOKENS, incremental, cumulative_logprobs))
        assert joined([*parts, last]) == WHOLE
        assert all(part.finish is None and not part.versions for part in parts)
        assert (last.finish, last.usage, last.versions) == ("stop", Usage(2, 4), (VersionSpan(0, 4, 0),))

    async def test_tokens_come_as_they_are_sampled(self) -> None:
        server = SglangLike(TOKENS, hold=asyncio.Event())
        async with client_of(server) as engine, aclosing(engine.generate("r1", ids(5), SAMPLING)) as parts:
            seen: list[int] = []
            while len(seen) < 3:
                seen += (await anext(parts)).ids
            assert server.hold is not None
            server.hold.set()
            assert [part.ids async for part in parts] == [(2,)]

    async def test_nothing_of_a_sampling_is_left_to_the_server(self) -> None:
        server = SglangLike(TOKENS)
        async with client_of(server) as engine:
            await collect(engine)
        (_, body) = server.requests[0]
        seed = body["sampling_params"].pop("sampling_seed")
        assert 0 <= seed < 2**31
        assert body == {
            "input_ids": [5, 6],
            "sampling_params": {
                "max_new_tokens": 64,
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": -1,
                "stop_token_ids": [2],
                "min_p": 0.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "repetition_penalty": 1.0,
                "min_new_tokens": 0,
                "ignore_eos": False,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "rid": "r1.",
            "stream": True,
        }

    async def test_samples_of_one_prompt_have_seeds_of_their_own(self) -> None:
        server = SglangLike(TOKENS)
        async with client_of(server) as engine:
            for _ in range(3):
                await collect(engine)
        assert len({body["sampling_params"]["sampling_seed"] for _, body in server.requests}) == 3

    @pytest.mark.parametrize(
        ("sampling", "sent"),
        [
            (ResolvedSampling(1, json_schema=msgspec.Raw(b'{"type":"object"}')), {"json_schema": '{"type":"object"}'}),
            (ResolvedSampling(1, regex="a+"), {"regex": "a+"}),
            (ResolvedSampling(1, top_k=7), {"top_k": 7}),
        ],
    )
    async def test_what_a_reply_is_held_to(self, sampling: ResolvedSampling, sent: dict[str, Any]) -> None:
        server = SglangLike(TOKENS)
        async with client_of(server) as engine:
            await collect(engine, sampling)
        assert sent.items() <= server.requests[0][1]["sampling_params"].items()

    async def test_an_update_in_mid_generation_keeps_both_versions(self) -> None:
        spans = [{"version": "default", "start": 0, "end": 3}, {"version": "7", "start": 3, "end": 4}]
        parts = await of(SglangLike(TOKENS, versions=("default", "default", "7"), spans=spans))
        assert parts[-1].versions == (VersionSpan(0, 3, 0), VersionSpan(3, 4, 7))


class TestEnds:
    async def test_a_full_reply(self) -> None:
        parts = await of(SglangLike(TOKENS[:2], finish={"type": "length", "length": 2}))
        assert (parts[-1].finish, parts[-1].usage) == ("length", Usage(2, 2))

    async def test_abort_ends_the_stream_with_what_was_sampled(self) -> None:
        server = SglangLike(TOKENS, finish={"type": "abort", "message": "Aborted", "status_code": None, "err_type": None})
        server.hold = server.aborted
        async with client_of(server) as engine:
            call = asyncio.ensure_future(collect(engine))
            while not server.requests:
                await asyncio.sleep(0.005)
            await engine.abort("r1")
            parts = await call
        assert server.requests[1] == ("/abort_request", {"rid": "r1."})
        assert (joined(parts), parts[-1].finish) == (WHOLE, "abort")

    async def test_an_abort_that_repeats_the_last_id_adds_nothing(self) -> None:
        class Echo(SglangLike):
            def _event(self, size: int, last: bool) -> dict[str, Any]:
                event = super()._event(size - last, last)
                if last:  # as SGLang answers for a request that waits to be resumed
                    del event["meta_info"]["prompt_tokens"]
                    event["meta_info"]["output_token_logprobs"] = [[value, token, None] for token, value in self.tokens[:-1]]
                return event

        parts = await of(Echo([*TOKENS[:2], TOKENS[1]], incremental=True, finish={"type": "abort", "message": "Aborted"}))
        assert joined(parts) == ([504, 7042], [-0.5, -2.5])
        assert (parts[-1].finish, parts[-1].usage) == ("abort", None)

    async def test_a_closed_generator_aborts_on_the_server(self) -> None:
        server = SglangLike(TOKENS, hold=asyncio.Event())
        async with client_of(server) as engine:
            async with aclosing(engine.generate("r1", ids(5), SAMPLING)) as parts:
                await anext(parts)
            async with asyncio.timeout(2):
                await server.aborted.wait()


class TestFaults:
    @pytest.mark.parametrize("incremental", [False, True])
    async def test_ids_that_are_counted_and_not_sent_are_refused_by_name(self, incremental: bool) -> None:
        with pytest.raises(EngineError, match="T08: the engine counts 2 tokens after 0, and sent 1"):
            await of(SglangLike(TOKENS, incremental, hidden=1))

    async def test_logprobs_of_other_tokens_are_refused_by_name(self) -> None:
        class Shifted(SglangLike):
            def _event(self, size: int, last: bool) -> dict[str, Any]:
                event = super()._event(size, last)
                event["output_ids"] = [token + 1 for token in event["output_ids"]]
                return event

        with pytest.raises(EngineError, match=r"T08.*\[505.*\].*\[504.*\]"):
            await of(Shifted(TOKENS))

    @pytest.mark.parametrize("matched", ["NaN happened", 7, None])
    async def test_a_stop_at_anything_but_the_last_id_is_refused_by_name(self, matched: object) -> None:
        with pytest.raises(EngineError, match="T06: the engine stopped at .*, and the last id that it sent is 2"):
            await of(SglangLike(TOKENS, finish={"type": "stop", "matched": matched}))

    async def test_a_null_logprob_is_nan_for_the_detector(self) -> None:
        _, logprobs = joined(await of(SglangLike([(504, None), TOKENS[-1]])))
        assert math.isnan(logprobs[0])

    async def test_new_weights_that_a_server_without_spans_cannot_place_are_refused_by_name(self) -> None:
        with pytest.raises(EngineError, match="W01.*default, v7"):
            await of(SglangLike(TOKENS, versions=("default", "v7")))

    @pytest.mark.parametrize(("status", "kind"), [(400, EngineRefusal), (500, EngineError)])
    async def test_a_refusal_after_the_head_keeps_its_kind(self, status: int, kind: type[EngineError]) -> None:
        finish = {"type": "abort", "message": "too long", "status_code": status, "err_type": "BadRequestError"}
        with pytest.raises(EngineError, match="too long") as caught:
            await of(SglangLike(TOKENS, finish=finish))
        assert type(caught.value) is kind

    async def test_a_refusal_before_it_carries_the_servers_message(self) -> None:
        with pytest.raises(EngineRefusal, match="/generate with 400: not today"):
            await of(SglangLike(TOKENS, status=400))

    async def test_a_stream_without_a_finish(self) -> None:
        class Cut(SglangLike):
            def _event(self, size: int, last: bool) -> dict[str, Any]:
                return super()._event(size, False)

        with pytest.raises(EngineError, match="without a finish reason"):
            await of(Cut(TOKENS))

    async def test_a_reply_that_goes_on_after_its_end_is_refused_by_name(self) -> None:
        class Endless(SglangLike):
            def _event(self, size: int, last: bool) -> dict[str, Any]:
                return super()._event(size, True)

        with pytest.raises(EngineError, match="T06: the engine went on with a reply that it had ended"):
            await of(Endless(TOKENS, finish={"type": "length", "length": 1}))

    @pytest.mark.parametrize("token", [-1, 1 << 31])
    async def test_what_is_no_token_is_refused(self, token: int) -> None:
        with pytest.raises(EngineError, match="sent what its kind would not"):
            await of(SglangLike([(token, -1.0), TOKENS[-1]]))

    async def test_a_wrong_prompt_count_reaches_the_detectors(self) -> None:
        assert (await of(SglangLike(TOKENS, prompt_tokens=1)))[-1].usage == Usage(1, 4)


class TestAsides:
    async def test_what_it_is(self) -> None:
        async with client_of(SglangLike(TOKENS)) as engine:
            assert await engine.info() == EngineInfo("m", "/models/t", 4096, constrains=True, chats=True)

    async def test_its_tokenizer(self) -> None:
        server = SglangLike(TOKENS)
        async with client_of(server) as engine:
            assert (await engine.tokenize("hi")).tolist() == [5, 6]
        assert server.requests == [("/tokenize", {"prompt": "hi", "add_special_tokens": True})]

    async def test_scores_are_of_the_prompt_at_temperature_1(self) -> None:
        server = SglangLike(TOKENS)
        async with client_of(server) as engine:
            scores = await engine.score(ids(5, 6, 7))
        assert scores.dtype == np.float32
        assert scores.tolist() == [-6.0, -7.0]
        body = server.requests[0][1]
        assert (body["logprob_start_len"], body["sampling_params"]["max_new_tokens"]) == (0, 0)
        assert body["sampling_params"]["temperature"] == 1.0

    async def test_scores_of_other_tokens_are_refused_by_name(self) -> None:
        class Short(SglangLike):
            def _told(self, path: str, body: Any) -> Any:
                return super()._told(path, {**body, "input_ids": body["input_ids"][:-1]})

        async with client_of(Short(TOKENS)) as engine:
            with pytest.raises(EngineError, match="T08: the engine scored 2 tokens"):
                await engine.score(ids(5, 6, 7))

    async def test_every_request_brings_the_key(self) -> None:
        server = SglangLike(TOKENS, key="the-key")
        async with client_of(server, "the-key") as engine:
            await collect(engine)
            await engine.info()
        async with client_of(replace(server, requests=[])) as engine:
            with pytest.raises(EngineError, match="with 401: Unauthorized; set POLAR_ENGINE_KEY"):
                await engine.info()


class TestWeights:
    @pytest.mark.parametrize(
        ("control", "sent"),
        [
            (lambda engine: engine.pause(), ("/pause_generation", {"mode": "retract"})),
            (lambda engine: engine.pause("abort"), ("/pause_generation", {"mode": "abort"})),
            (lambda engine: engine.resume(), ("/continue_generation", {})),
            (
                lambda engine: engine.reload_weights("/weights/7"),
                ("/update_weights_from_disk", {"model_path": "/weights/7", "flush_cache": True}),
            ),
            (
                lambda engine: engine.update_version(7),
                ("/update_weight_version", {"new_version": "7", "abort_all_requests": False}),
            ),
            (lambda engine: engine.reset_prefix_cache(), ("/flush_cache", {})),
        ],
    )
    async def test_each_control_is_sglangs_route(
        self, control: Callable[[SglangEngine], Awaitable[None]], sent: tuple[str, Any]
    ) -> None:
        server = SglangLike(TOKENS)
        async with client_of(server) as engine:
            await control(engine)
        assert server.requests == [sent]

    async def test_a_control_that_failed_is_an_error(self) -> None:
        async with client_of(SglangLike(TOKENS, status=400)) as engine:
            with pytest.raises(EngineError, match="/flush_cache with 400"):
                await engine.reset_prefix_cache()

    async def test_a_pause_that_sglang_lacks_is_refused(self) -> None:
        async with client_of(SglangLike(TOKENS)) as engine:
            with pytest.raises(EngineRefusal, match="cannot pause by 'wait'"):
                await engine.pause("wait")
