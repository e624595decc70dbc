"""The real vLLM behind the gateway: the same calls, the same proofs. Needs `make vllm`; run by `make test-all`."""

import asyncio
from pathlib import Path

import numpy as np
import openai
import pytest

from polar.engines.embedded.models import resolve
from polar.engines.renderers import load_renderer
from polar.engines.served import served
from polar.engines.vllm import VllmEngine
from polar.gateway.gateway import Gateway, gateway
from polar.rollout.observer import Silent
from polar.rollout.runner import RunOptions, run_tasks
from polar.specs import EvaluatorSpec, HarnessProfile, SamplingSpec, Task
from polar.store.captured import read_captured
from polar.trajectory.builders import build
from tests.gateway.conversation import Conversation

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]


def sdk(running: Gateway, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.base_url(key)}/v1", api_key="any", max_retries=0)


async def test_a_conversation_is_one_trace_and_a_plain_prefill_gives_its_log_probabilities(vllm: str, tmp_path: Path) -> None:
    engine = VllmEngine(vllm)
    async with gateway(await served(engine, load_renderer(resolve("smollm2"))), tmp_path / "capture.db") as running:
        opened = await running.sessions.open(task_id="t", profile=HarnessProfile(), sampling=SamplingSpec(max_tokens=32))
        talk = Conversation(sdk(running, opened.key), [{"role": "user", "content": "What is the capital of France?"}])
        for turn in range(3):
            await talk.ask(stream=turn % 2 == 0)
            talk.messages.append({"role": "user", "content": "And of Italy?"})
        session = await running.sessions.freeze(opened.session_id)
        assert [call.status for call in session.calls.values()] == ["ok"] * 3
        captured = read_captured(tmp_path / "capture.db", opened.session_id)
        (trace,) = build(captured, builder="prefix_merging", status="completed", reward=1.0).traces
        scores = await engine.score(np.concatenate([trace.prompt_ids, trace.response_ids]))
    await engine.close()
    mask = trace.loss_mask == 1
    assert np.abs(scores[len(trace.prompt_ids) - 1 :][mask] - trace.response_logprobs[mask]).max() < 1e-3


async def test_a_hang_up_in_mid_stream_aborts_the_generation(vllm: str, tmp_path: Path) -> None:
    engine = VllmEngine(vllm)
    async with gateway(await served(engine, load_renderer(resolve("smollm2"))), tmp_path / "capture.db") as running:
        opened = await running.sessions.open(task_id="t", profile=HarnessProfile(), sampling=SamplingSpec(max_tokens=2000))
        stream = await sdk(running, opened.key).chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Count from one to a thousand, in words."}], stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        session = running.sessions.by_id(opened.session_id)
        async with asyncio.timeout(10):
            while not session.calls:
                await asyncio.sleep(0.05)
        (call,) = session.calls.values()
    await engine.close()
    assert call.status == "aborted"
    assert 0 < call.sampled < 500


async def test_pi_on_vllm_scores_as_the_embedded_engine_would(vllm: str, tmp_path: Path) -> None:
    task = Task(
        id="france",
        instruction="What is the capital of France?",
        evaluator=EvaluatorSpec("command", 'grep -qiw paris "$POLAR_ANSWER"'),
        sampling=SamplingSpec(max_tokens=24),
        samples=3,
    )
    summary = await run_tasks([task], RunOptions(tmp_path / "run", vllm, concurrency=3), Silent())
    assert [result.status for result in summary.results] == ["completed"] * 3
    assert all(result.traces == 1 and result.accounting.trained > 0 for result in summary.results)
