"""T05: a second BOS fails the call, whoever put it there."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from polar.audit.session import prove_session
from polar.chat import Message, Tool
from polar.engines.scripted import Scripted, ScriptedEngine, scripted_server
from polar.engines.served import served
from polar.engines.tokenizers import load_tokenizer
from polar.engines.vllm import VllmEngine
from polar.gateway.gateway import gateway
from polar.specs import HarnessProfile, Int32Array, SamplingSpec
from polar.store.captured import read_captured
from polar.tokens.chatml import ChatMLRenderer
from tests.gateway.conversation import Conversation


class Doubling(ChatMLRenderer):
    """Writes what begins every prompt once more."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        ids = super().render(messages, tools)
        return np.concatenate([ids[:1], ids])


@pytest.mark.parametrize("doubled", [False, True])
async def test_a_call_whose_prompt_begins_with_two_bos_is_refused(
    doubled: bool, policy_tokenizer: Tokenizer, smollm2_dir: Path, tmp_path: Path
) -> None:
    renderer, capture = (Doubling if doubled else ChatMLRenderer)(load_tokenizer(smollm2_dir), "Hi."), tmp_path / "capture.db"
    begins = int(renderer.render((), ())[0])
    async with scripted_server(ScriptedEngine(policy_tokenizer, lambda call: Scripted("Hello."))) as url:
        engine = VllmEngine(url)
        try:
            async with gateway(replace(await served(engine, renderer), bos_id=begins), capture) as running:
                opened = await running.sessions.open(task_id="t", profile=HarnessProfile(), sampling=SamplingSpec())
                address = f"{running.base_url(opened.key)}/v1"
                async with openai.AsyncOpenAI(base_url=address, api_key="any", max_retries=0) as client:
                    with pytest.raises(openai.APIStatusError, match="T05") if doubled else nullcontext():
                        await Conversation(client, tools=None).ask()
                await running.sessions.freeze(opened.session_id)
        finally:
            await engine.close()
    captured = read_captured(capture, opened.session_id)
    assert [[finding.code for finding in call.findings] for call in captured.calls] == [["T05"] if doubled else []]
    assert prove_session(captured, None, None).findings == []
