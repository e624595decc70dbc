"""Chat mode on the real vLLM behind the gateway: it renders and reads, and its ids are held against what is stored."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import openai
import pytest

from polar.audit.session import audit_session
from polar.engines.embedded.models import resolve
from polar.engines.renderers import load_renderer
from polar.engines.served import served
from polar.engines.vllm import VllmEngine
from polar.gateway.gateway import Gateway, gateway
from polar.specs import HarnessProfile, SamplingSpec
from polar.store.captured import read_captured
from polar.tokens.drift import CODES
from polar.trajectory.builders import Captured, build
from tests.gateway.conversation import Conversation

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]


@dataclass
class Open:
    """A session in chat mode."""

    engine: VllmEngine
    gateway: Gateway
    capture: Path
    session_id: str
    key: str

    @property
    def url(self) -> str:
        return self.gateway.base_url(self.key)

    @property
    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)

    async def captured(self) -> Captured:
        """All that is stored, in which the audit finds nothing."""
        await self.gateway.sessions.freeze(self.session_id)
        record = read_captured(self.capture, self.session_id)
        assert audit_session(record, None, None) == []
        return record


@asynccontextmanager
async def chatting(vllm: str, path: Path, max_tokens: int = 24) -> AsyncIterator[Open]:
    engine = VllmEngine(vllm)
    decode = load_renderer(resolve("smollm2")).decode
    async with gateway(await served(engine, None, decode=decode), path / "capture.db") as running:
        opened = await running.sessions.open(task_id="t", profile=HarnessProfile(), sampling=SamplingSpec(max_tokens=max_tokens))
        yield Open(engine, running, path / "capture.db", opened.session_id, opened.key)
    await engine.close()


async def test_a_conversation_is_what_the_engine_saw_and_said_and_its_scores_are_a_prefills(vllm: str, tmp_path: Path) -> None:
    async with chatting(vllm, tmp_path) as session:
        talk = Conversation(session.client, [{"role": "user", "content": "What is the capital of France?"}], None)
        for turn in range(4):
            await talk.ask(stream=turn % 2 == 0)
            talk.messages.append({"role": "user", "content": "And of Italy?"})
        captured = await session.captured()
        assert [call.status for call in captured.calls] == ["ok"] * 4
        assert {call.fork_reason for call in captured.calls} <= {"", *CODES}
        trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
        assert trajectory.accounting.trained == trajectory.accounting.sampled > 0
        for trace in trajectory.traces:
            scores = await session.engine.score(np.concatenate([trace.prompt_ids, trace.response_ids]))
            mask = trace.loss_mask == 1
            assert np.abs(scores[len(trace.prompt_ids) - 1 :][mask] - trace.response_logprobs[mask]).max() < 1e-3


async def test_a_hang_up_aborts_and_what_was_sampled_is_counted(vllm: str, tmp_path: Path) -> None:
    async with chatting(vllm, tmp_path, max_tokens=2000) as session:
        stream = await session.client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Count from one to a thousand, in words."}], stream=True
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        await stream.close()
        async with asyncio.timeout(10):
            while session.gateway.sessions.by_id(session.session_id).runs:
                await asyncio.sleep(0.05)
        (call,) = (await session.captured()).calls
        assert call.status == "aborted"
        assert 0 < call.sampled < 500
        assert call.choices[0].node is not None


async def test_a_tool_that_must_be_called_is_served_and_constrained(vllm: str, tmp_path: Path) -> None:
    async with chatting(vllm, tmp_path, max_tokens=64) as session:
        await Conversation(session.client).ask(tool_choice={"type": "function", "function": {"name": "bash"}})
        captured = await session.captured()
        (call,) = captured.calls
        assert (call.constrained, call.unserved) == (True, ())
        ids = captured.nodes[call.choices[0].node or 0].ids.tolist()
        assert load_renderer(resolve("smollm2")).decode(ids).startswith("<tool_call>")


async def test_the_engine_counts_what_it_would_render_and_refuses_what_is_too_long(vllm: str, tmp_path: Path) -> None:
    async with chatting(vllm, tmp_path) as session:
        messages = [{"role": "user", "content": "Hi"}]
        body = {"model": "m", "max_tokens": 9, "messages": messages}
        async with aiohttp.request("POST", f"{session.url}/v1/messages/count_tokens", json=body) as reply:
            counted = (await reply.json())["input_tokens"]
        await Conversation(session.client, list(messages), None).ask()
        with pytest.raises(openai.BadRequestError) as refused:
            await Conversation(session.client, [{"role": "user", "content": "word " * 5000}], None).ask()
        assert refused.value.code == "context_length_exceeded"
        first, _ = (await session.captured()).calls
        assert counted == first.prompt_tokens


async def test_a_stop_text_ends_the_generation(vllm: str, tmp_path: Path) -> None:
    async with chatting(vllm, tmp_path, max_tokens=400) as session:
        talk = Conversation(session.client, [{"role": "user", "content": "Count from one to a hundred, in digits."}], None)
        said = (await talk.ask(stop=["2", "two"]))["content"]
        assert "2" not in said
        (call,) = (await session.captured()).calls
        assert call.choices[0].stop_sequence in ("2", "two")
        assert call.sampled < 400
