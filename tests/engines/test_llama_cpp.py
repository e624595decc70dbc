"""The client of llama.cpp's `/completion`, against a small server that answers as b11549 does; `tests/e2e` has the real one."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from polar.chat import Usage
from polar.engines.llama_cpp import STEP, LlamaCppEngine
from polar.engines.llama_cpp_wire import Shown, matched
from polar.engines.protocol import EngineInfo, Generated, ResolvedSampling
from polar.errors import EngineError, EngineRefusal
from polar.specs import Int32Array, VersionSpan

PROMPT = np.array([1, 50, 60], np.int32)
SAMPLING = ResolvedSampling(max_tokens=100, stop_token_ids=(2,))
LETTER = 97


@dataclass
class LlamaCppLike:
    """Says `reply` after `PROMPT`, as many tokens at once as are asked for, and stops at 2.

    Attributes:
        inside: ids that end inside a character, whose log-probabilities are not told. That of a token is minus a hundredth of it.
        told: fields of an answer that are other than they should be.
        letter: ids of the letter a.
        hold: completions wait for it.
        requests: bodies of the requests for completions.
        most: how many were served at once.
    """

    reply: Sequence[int]
    inside: Sequence[int] = ()
    told: dict[str, Any] = field(default_factory=dict)
    letter: Sequence[int] = (LETTER,)
    hold: asyncio.Event | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    busy: int = 0
    most: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/props":
            return web.json_response({"default_generation_settings": {"n_ctx": 64}, "model_alias": "m.gguf", "total_slots": 2})
        body: Any = await request.json()
        if request.path == "/tokenize":
            return web.json_response({"tokens": self.letter if body["content"] == "a" else [1, 5]})
        self.requests.append(body)
        if len(body["prompt"]) >= 64:
            return web.json_response({"error": {"code": 400, "message": "exceeds the available context size"}}, status=400)
        self.busy += 1
        self.most = max(self.most, self.busy)
        if self.hold is not None:
            await self.hold.wait()
        await asyncio.sleep(0)
        self.busy -= 1
        return web.json_response(self._completion(body))

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        said = len(body["prompt"]) - len(PROMPT)
        tokens = [body["logit_bias"][0][0]] if body["logit_bias"] else list(self.reply[said : said + body["n_predict"]])
        likeliest = [self._shown(token) for token in range(body["n_probs"])] if body["n_probs"] < 1000 else self._vocabulary()
        probabilities = [{**self._shown(token), "top_logprobs": likeliest} for token in tokens if token not in self.inside]
        return {
            "tokens": tokens,
            "stop_type": "eos" if tokens[-1:] == [2] else "limit",
            "tokens_predicted": len(tokens),
            "tokens_evaluated": len(body["prompt"]),
            "tokens_cached": len(body["prompt"]) + len(tokens) - 1,
            "completion_probabilities": probabilities,
            "generation_settings/speculative.types": "none",
            **self.told,
        }

    def _vocabulary(self) -> list[dict[str, Any]]:
        return [self._shown(token) for token in range(10_000)]

    def _shown(self, token: int) -> dict[str, Any]:
        return {"id": token, "token": "…", "bytes": [], "logprob": -token / 100}


@asynccontextmanager
async def client_of(server: LlamaCppLike) -> AsyncIterator[LlamaCppEngine]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = LlamaCppEngine(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield engine
    finally:
        await engine.close()
        await runner.cleanup()


async def of(server: LlamaCppLike, sampling: ResolvedSampling = SAMPLING) -> list[Generated]:
    async with client_of(server) as engine:
        return await collect(engine, sampling)


async def collect(engine: LlamaCppEngine, sampling: ResolvedSampling = SAMPLING, prompt: Int32Array = PROMPT) -> list[Generated]:
    return [part async for part in engine.generate("r1", prompt, sampling)]


def joined(parts: list[Generated]) -> tuple[list[int], list[float]]:
    return [token for part in parts for token in part.ids], [value for part in parts for value in part.logprobs]


class TestMatching:
    def test_all_shown(self) -> None:
        assert matched([5, 6, 5], [Shown(5, -1.0), Shown(6, -2.0), Shown(5, -3.0)]) == [-1.0, -2.0, -3.0]

    def test_hidden_ones_are_unknown(self) -> None:
        assert matched([5, 6, 7, 8], [Shown(6, -2.0), Shown(8, -4.0)]) == [None, -2.0, None, -4.0]

    def test_one_that_may_be_of_two_places_is_unknown(self) -> None:
        assert matched([5, 6, 6, 8], [Shown(5, -1.0), Shown(6, -2.0), Shown(8, -4.0)]) == [-1.0, None, None, -4.0]

    def test_null_is_nan_for_the_detector(self) -> None:
        (value,) = matched([5], [Shown(5, None)])
        assert value is not None
        assert math.isnan(value)

    @pytest.mark.parametrize("shown", [[7], [6, 5], [5, 6, 6]])
    def test_what_was_not_sampled_is_refused_by_name(self, shown: list[int]) -> None:
        with pytest.raises(EngineError, match=r"T08.*\[5, 6\]"):
            matched([5, 6], [Shown(token, -1.0) for token in shown])


class TestGenerate:
    async def test_a_reply_is_sampled_in_steps_that_go_on_from_each_other(self) -> None:
        reply = [*range(100, 100 + 2 * STEP), 2]
        server = LlamaCppLike(reply)
        *parts, last = await of(server)
        assert joined([*parts, last]) == (reply, [-token / 100 for token in reply])
        assert [len(part.ids) for part in (*parts, last)] == [STEP, STEP, 1]
        assert (last.finish, last.usage, last.versions) == ("stop", Usage(3, len(reply)), (VersionSpan(0, len(reply), 0),))
        assert [body["prompt"] for body in server.requests] == [[1, 50, 60, *reply[:size]] for size in (0, STEP, 2 * STEP)]

    async def test_a_reply_ends_at_its_limit(self) -> None:
        server = LlamaCppLike(range(100, 164))
        parts = await of(server, ResolvedSampling(max_tokens=STEP + 4))
        assert (len(joined(parts)[0]), parts[-1].finish) == (STEP + 4, "length")
        assert [body["n_predict"] for body in server.requests] == [STEP, 4]

    async def test_a_reply_ends_where_the_context_is_full(self) -> None:
        parts = await of(LlamaCppLike(range(100, 110)))
        assert (joined(parts)[0], parts[-1].finish) == (list(range(100, 110)), "length")

    async def test_a_stop_id_that_the_server_does_not_know_ends_the_reply(self) -> None:
        parts = await of(LlamaCppLike([100, 101, 7, 102, 103, 2]), ResolvedSampling(max_tokens=100, stop_token_ids=(7,)))
        assert joined(parts)[0] == [100, 101, 7]
        assert (parts[-1].finish, parts[-1].usage) == ("stop", Usage(3, 3))

    async def test_a_constrained_reply_is_one_step(self) -> None:
        server = LlamaCppLike([*range(100, 100 + 2 * STEP), 2])
        schema = msgspec.Raw(b'{"type":"object"}')
        assert len(await of(server, ResolvedSampling(max_tokens=50, json_schema=schema))) == 1
        assert (server.requests[0]["n_predict"], server.requests[0]["json_schema"]) == (50, {"type": "object"})

    @pytest.mark.parametrize(
        ("regex", "written"),
        [("a/b+", r"a\/b+"), (r"a\/b+", r"a\/b+"), (r"a\\/b", r"a\\\/b"), ("a\nb", r"a\nb"), ("a\\\nb", r"a\nb")],
    )
    async def test_a_regex_goes_as_a_grammar_of_one_line(self, regex: str, written: str) -> None:
        server = LlamaCppLike([100, 2])
        await of(server, ResolvedSampling(max_tokens=50, regex=regex))
        assert server.requests[0]["grammar"] == f"%llguidance {{}}\nstart: /{written}/\n"

    async def test_nothing_of_a_sampling_is_left_to_the_server(self) -> None:
        server = LlamaCppLike([100, 2])
        await of(server, ResolvedSampling(max_tokens=9, temperature=0.5, top_p=0.9, top_k=7))
        body = server.requests[0]
        pinned = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "samplers": ["temperature", "top_k", "top_p"], "mirostat": 0}
        assert pinned.items() <= body.items()
        assert body["seed"] == 0xFFFFFFFF, "a seed of the server's command line would make all samples of a prompt the same"

    async def test_no_more_generations_at_once_than_slots(self) -> None:
        server = LlamaCppLike([*range(100, 150), 2])
        async with client_of(server) as engine:
            replies = await asyncio.gather(*(collect(engine) for _ in range(6)))
        assert server.most == 2
        assert {len(joined(parts)[0]) for parts in replies} == {51}


class TestCharacters:
    async def test_a_token_that_ends_inside_a_character_gets_what_the_model_gives_it(self) -> None:
        server = LlamaCppLike([100, 201, 202, 103, 2], inside=(201, 202))
        assert joined(await of(server)) == ([100, 201, 202, 103, 2], [-1.0, -2.01, -2.02, -1.03, -0.02])
        lookups = [body for body in server.requests if body["logit_bias"]]
        assert lookups[0]["prompt"] == [1, 50, 60, 100, 201], "the last first"
        assert lookups[-1]["prompt"] == [1, 50, 60, 100]
        assert lookups[-1]["logit_bias"] == [[LETTER, 1e6]]

    async def test_an_unlikely_one_is_found_in_the_whole_vocabulary(self) -> None:
        assert joined(await of(LlamaCppLike([9_000, 2], inside=(9_000,))))[1] == [-90.0, -0.02]

    async def test_one_that_the_server_never_names_is_refused_by_name(self) -> None:
        with pytest.raises(EngineError, match="T08: the engine gives token 20000 no log-probability"):
            await of(LlamaCppLike([20_000, 2], inside=(20_000,)))

    async def test_a_vocabulary_without_letters_is_refused_by_name(self) -> None:
        with pytest.raises(EngineError, match="T08: the engine has no token for the letter 'a'"):
            await of(LlamaCppLike([201, 2], inside=(201,), letter=()))


class TestAbort:
    async def test_abort_ends_the_stream_after_the_step_with_what_was_sampled(self) -> None:
        server = LlamaCppLike(range(100, 150), hold=asyncio.Event())
        async with client_of(server) as engine:
            call = asyncio.ensure_future(collect(engine))
            while not server.requests:
                await asyncio.sleep(0.005)
            await engine.abort("r1")
            assert server.hold is not None
            server.hold.set()
            parts = await call
        assert joined(parts)[0] == list(range(100, 100 + STEP))
        assert (parts[-1].finish, parts[-1].versions) == ("abort", (VersionSpan(0, STEP, 0),))

    async def test_an_unknown_id_is_no_error(self) -> None:
        async with client_of(LlamaCppLike([2])) as engine:
            await engine.abort("nobody")

    async def test_a_closed_generator_asks_for_no_more_and_gives_its_slot_back(self) -> None:
        server = LlamaCppLike([*range(100, 150), 2])
        async with client_of(server) as engine:
            for _ in range(3):  # more than there are slots
                async with aclosing(engine.generate("r1", PROMPT, SAMPLING)) as parts:
                    await anext(parts)
            assert len(server.requests) == 3
            async with asyncio.timeout(2):
                await collect(engine)


class TestFaults:
    @pytest.mark.parametrize(
        ("told", "says"),
        [
            ({"tokens_predicted": 3}, "T08: the engine sampled 3 tokens and sent 2 ids"),
            ({"tokens": [100, 101]}, r"T08.*\[100, 101\].*\[100, 2\]"),
            ({"tokens_cached": 2}, "T10: the engine dropped 2 tokens of the context.*--context-shift"),
            ({"generation_settings/speculative.types": "draft"}, "L02: the engine decodes speculatively"),
            ({"stop_type": "word"}, "T06.*'word'"),
            ({"tokens": None}, "sent what its kind would not"),
            ({"tokens": [100, 1 << 40]}, "sent what its kind would not"),
            ({"tokens": [100, -1]}, "sent what its kind would not"),
        ],
    )
    async def test_what_cannot_be_trusted_is_refused_by_name(self, told: dict[str, Any], says: str) -> None:
        with pytest.raises(EngineError, match=says):
            await of(LlamaCppLike([100, 101] if "stop_type" in told else [100, 2], told=told))

    async def test_a_prompt_beyond_the_context_is_refused_with_the_servers_message(self) -> None:
        async with client_of(LlamaCppLike([2])) as engine:
            with pytest.raises(EngineRefusal, match="400: exceeds the available context size"):
                await collect(engine, prompt=np.ones(64, np.int32))

    async def test_a_wrong_prompt_count_reaches_the_detectors(self) -> None:
        parts = await of(LlamaCppLike([100, 2], told={"tokens_evaluated": 2}))
        assert parts[-1].usage == Usage(2, 2)


class TestAsides:
    async def test_what_it_is(self) -> None:
        async with client_of(LlamaCppLike([2])) as engine:
            assert await engine.info() == EngineInfo("m.gguf", "", 64, constrains=True)
            assert (await engine.tokenize("Hi")).tolist() == [1, 5]

    async def test_scores_are_of_a_fresh_prefill(self) -> None:
        server = LlamaCppLike([2], inside=(201,))
        async with client_of(server) as engine:
            scores = await engine.score(np.array([1, 50, 201, 60], np.int32))
        assert scores.dtype == np.float32
        assert scores.tolist() == np.array([-0.5, -2.01, -0.6], np.float32).tolist()
        assert [(body["prompt"], body["cache_prompt"]) for body in server.requests if body["n_probs"] == 1] == [
            ([1, 50, 201], False),
            ([1, 50], True),
            ([1], True),
        ]

    async def test_a_score_of_another_token_is_refused_by_name(self) -> None:
        async with client_of(
            LlamaCppLike([2], told={"tokens": [7], "completion_probabilities": [{"id": 7, "logprob": -1.0}]})
        ) as engine:
            with pytest.raises(EngineError, match="T08: the engine gives token 50 no log-probability"):
                await engine.score(np.array([1, 50], np.int32))

    async def test_the_recorded_answer_reads(self) -> None:
        recorded = (
            b'{"tokens":[7042,2],"stop_type":"eos","tokens_predicted":2,"tokens_evaluated":3,"tokens_cached":4,'
            b'"completion_probabilities":[{"id":7042,"token":" Paris","bytes":[32,80,97,114,105,115],'
            b'"logprob":-0.03055952861905098,'
            b'"top_logprobs":[]},'
            b'{"id":2,"token":"","bytes":[],"logprob":-0.41297027468681335,"top_logprobs":[{"id":2,"token":"","bytes":[],'
            b'"logprob":-0.41297027468681335}]}],"generation_settings/speculative.types":"none"}'
        )
        (part,) = await of(LlamaCppLike([], told=json.loads(recorded)))
        assert (part.ids, part.logprobs) == ((7042, 2), (-0.03055952861905098, -0.41297027468681335))
