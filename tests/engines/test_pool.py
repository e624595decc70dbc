"""Replicas as one engine: where calls go, and what happens when one dies."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from polar.engines import pool
from polar.engines.pool import EnginePool
from polar.engines.protocol import Generated, ResolvedSampling
from polar.engines.scripted import Scripted, ScriptedCall, ScriptedEngine, scripted_server
from polar.engines.vllm import VllmEngine
from polar.errors import EngineError, EngineRefusal, UsageError
from polar.specs import Int32Array

Script = Callable[[ScriptedCall], Scripted]
SAMPLING = ResolvedSampling(max_tokens=1000)
PROMPT = np.array([5, 6, 7, 8], np.int32)


def answer(call: ScriptedCall) -> Scripted:
    return Scripted("fine, thank you")


@dataclass
class Replica:
    """A scripted server that can be stopped and started on its port."""

    engine: ScriptedEngine
    port: int
    stack: AsyncExitStack

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        await self.stack.enter_async_context(scripted_server(self.engine, self.port))

    async def stop(self) -> None:
        await self.stack.aclose()


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "FIRST_PAUSE", 0.02)


@asynccontextmanager
async def replicas(tokenizer: Tokenizer, *scripts: Script) -> AsyncIterator[tuple[EnginePool, list[Replica]]]:
    """A pool of scripted servers, one per script."""
    async with AsyncExitStack() as stack:
        running: list[Replica] = []
        for script in scripts:
            running.append(Replica(ScriptedEngine(tokenizer, script), free_port(), AsyncExitStack()))
            await running[-1].start()
            stack.push_async_callback(running[-1].stop)
        engines = EnginePool({each.url: VllmEngine(each.url) for each in running})
        stack.push_async_callback(engines.close)
        await engines.info()
        yield engines, running


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


async def ask(engines: EnginePool, request_id: str, session_id: str = "", prompt: Int32Array = PROMPT) -> list[int]:
    return [token async for piece in engines.generate(request_id, prompt, SAMPLING, session_id=session_id) for token in piece.ids]


def asked(replica: Replica) -> list[str]:
    return [entry.request_id for entry in replica.engine.log]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_session_stays_where_it_is_and_new_ones_spread(tokenizer: Tokenizer) -> None:
    async with replicas(tokenizer, answer, answer) as (engines, (left, right)):
        for turn in range(3):
            for session in ("s1", "s2"):
                await ask(engines, f"{session}-{turn}", session)
        assert asked(left) == ["s1-0", "s1-1", "s1-2"]
        assert asked(right) == ["s2-0", "s2-1", "s2-2"]


async def test_a_new_session_goes_where_the_fewest_calls_run(tokenizer: Tokenizer) -> None:
    held = asyncio.Event()
    async with replicas(tokenizer, lambda call: Scripted("ok", hold_before_end=held), answer) as (engines, (left, right)):
        waiting = asyncio.create_task(ask(engines, "slow", "s0"))
        await until(lambda: bool(left.engine.log))
        for number in range(3):
            await ask(engines, f"r{number}", f"s{number + 1}")
        held.set()
        await waiting
        assert (asked(left), asked(right)) == (["slow"], ["r0", "r1", "r2"])


async def test_the_share_of_known_prompt_tokens_is_measured(tokenizer: Tokenizer) -> None:
    async with replicas(tokenizer, answer, answer) as (engines, _):
        reply = await ask(engines, "r1", "s1")
        await ask(engines, "r2", "s1", np.array([*PROMPT, *reply, 9, 9], np.int32))
        await ask(engines, "r3", "s2", PROMPT)
        first, second = engines.stats()
        assert (first.prompt_tokens, first.known_tokens) == (4 + 4 + len(reply) + 2, 4 + len(reply))
        assert 0.5 < first.hit_rate < 1
        assert (second.calls, second.hit_rate) == (1, 0.0)


async def test_a_dead_replicas_calls_go_elsewhere_and_it_comes_back(tokenizer: Tokenizer) -> None:
    async with replicas(tokenizer, answer, answer) as (engines, (left, right)):
        await ask(engines, "r1", "s1")
        await left.stop()
        assert await ask(engines, "r2", "s1")
        assert asked(right) == ["r2"]
        dead, _ = engines.stats()
        assert (dead.alive, dead.moved) == (False, 1)
        await left.start()
        await until(lambda: engines.stats()[0].alive)
        await ask(engines, "r3", "s1")
        assert asked(right) == ["r2", "r3"]  # the session has a new home


async def test_who_was_away_gets_the_weights_of_the_others_before_any_work(tokenizer: Tokenizer) -> None:
    async with replicas(tokenizer, answer, answer) as (engines, (left, right)):
        await left.stop()
        for number in range(2):
            await ask(engines, f"r{number}")
        await engines.pause()
        await engines.reload_weights("/weights/7")
        await engines.update_version(7)
        await engines.reset_prefix_cache()
        await engines.resume()
        await left.start()
        await until(lambda: engines.stats()[0].alive)
        told = [(control.path, control.body) for control in right.engine.controls]
        assert [(control.path, control.body) for control in left.engine.controls] == told
        assert left.engine.version == right.engine.version == "7"


async def test_who_was_away_gets_the_adapter_of_the_others(tokenizer: Tokenizer) -> None:
    async with replicas(tokenizer, answer, answer) as (engines, (left, right)):
        await left.stop()
        for number in range(2):
            await ask(engines, f"r{number}")
        await engines.load_adapter("/adapters/7", 7)
        await left.start()
        await until(lambda: engines.stats()[0].alive)
        loaded = [control for control in left.engine.controls if control.path == "/v1/load_lora_adapter"]
        assert ['"/adapters/7"' in control.body for control in loaded] == [True]
        assert engines.adapters == ("/adapters/7", "/adapters/7")
        await left.stop()
        await right.stop()


async def test_what_was_begun_is_never_begun_again(tokenizer: Tokenizer) -> None:
    script = [lambda call: Scripted("half of this is lost", fault="die", delay_per_token=0.01), answer]
    async with replicas(tokenizer, *script) as (engines, (left, right)):
        stream = engines.generate("r1", PROMPT, SAMPLING, session_id="s1")
        assert (await anext(stream)).ids
        await until(lambda: left.engine.log[0].freed_at is not None)
        await left.stop()
        with pytest.raises(EngineError):
            await drained(stream)
        assert not engines.stats()[0].alive
        assert asked(right) == []


async def drained(stream: AsyncGenerator[Generated, None]) -> list[Generated]:
    return [piece async for piece in stream]


async def test_a_fault_of_a_living_replica_is_told_and_not_hidden_by_another(tokenizer: Tokenizer) -> None:
    async with replicas(tokenizer, lambda call: Scripted("ok", fault="http_500"), answer) as (engines, (_, right)):
        with pytest.raises(EngineError, match="scripted fault"):
            await ask(engines, "r1", "s1")
        assert engines.stats()[0].alive
        assert asked(right) == []


async def test_a_refusal_is_not_asked_of_another(tokenizer: Tokenizer) -> None:
    async with replicas(tokenizer, answer, answer) as (engines, _):
        with pytest.raises(EngineRefusal, match="maximum context length"):
            await ask(engines, "r1", prompt=np.zeros(40_000, np.int32))
        assert [each.calls for each in engines.stats()] == [1, 0]


async def test_without_a_living_replica_the_error_names_them(tokenizer: Tokenizer) -> None:
    async with replicas(tokenizer, answer, answer) as (engines, running):
        for each in running:
            await each.stop()
        with pytest.raises(EngineError):
            await ask(engines, "r1")
        with pytest.raises(EngineError, match=f"none of the engines {running[0].url}, {running[1].url} answers"):
            await ask(engines, "r2")
        with pytest.raises(EngineError, match="none of the engines"):
            await engines.info()


async def test_replicas_of_different_models_are_refused(tokenizer: Tokenizer) -> None:
    short = ScriptedEngine(tokenizer, answer, max_model_len=1000)
    async with scripted_server(ScriptedEngine(tokenizer, answer)) as one, scripted_server(short) as other:
        engines = EnginePool({one: VllmEngine(one), other: VllmEngine(other)})
        with pytest.raises(UsageError, match="replicas must serve one model"):
            await engines.info()
        await engines.close()


async def test_weights_and_pauses_reach_all(tokenizer: Tokenizer) -> None:
    async with replicas(tokenizer, answer, answer) as (engines, running):
        await engines.pause("keep")
        assert not any(each.engine.resumed.is_set() for each in running)
        await engines.update_version(3)
        await engines.resume()
        assert [each.engine.version for each in running] == ["3", "3"]
        assert all(each.engine.resumed.is_set() for each in running)


async def test_an_abort_reaches_who_generates(tokenizer: Tokenizer) -> None:
    held = asyncio.Event()
    script = [lambda call: Scripted("ok", hold_before_end=held)] * 2
    async with replicas(tokenizer, *script) as (engines, (left, _)):
        waiting = asyncio.create_task(ask(engines, "r1"))
        await until(lambda: bool(left.engine.log))
        await engines.abort("r1")
        await engines.abort("nobody")
        await waiting
        assert left.engine.log[0].finish == "abort"


async def test_any_replica_scores_and_tokenizes(tokenizer: Tokenizer) -> None:
    async with replicas(tokenizer, answer, answer) as (engines, (left, _)):
        await left.stop()
        assert len(await engines.score(PROMPT)) == 3
        assert len(await engines.tokenize("two words")) == 2


async def test_a_mode_of_log_probabilities_is_that_of_all(tokenizer: Tokenizer) -> None:
    async with replicas(tokenizer, answer, answer) as (engines, _):
        engines.logprobs_mode = "processed"
        assert engines.logprobs_mode == "processed"
        assert {replica.engine.logprobs_mode for replica in engines._replicas} == {"processed"}
