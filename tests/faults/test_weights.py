"""W03, W04: weights change while a harness waits, and rewards reach traces."""

import json
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer

from polar.engines.scripted import Scripted, ScriptedCall, ScriptedEngine, scripted_server
from polar.engines.served import served
from polar.engines.vllm import VllmEngine
from polar.gateway import app
from polar.gateway.gateway import gateway
from polar.specs import HarnessProfile, SamplingSpec
from polar.store.captured import read_captured
from polar.tokens.rendering import Renderer
from polar.trajectory.builders import build
from tests.gateway.conftest import Serve
from tests.gateway.conversation import Conversation


async def test_a_pause_in_mid_generation_keeps_the_stream_alive_and_both_versions(
    policy_tokenizer: Tokenizer, policy_renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "HEADERS_AFTER", 0.02)
    monkeypatch.setattr(app, "KEEP_ALIVE_EVERY", 0.02)
    scripted = ScriptedEngine(policy_tokenizer, lambda call: Scripted("word " * 100, delay_per_token=0.005))
    async with scripted_server(scripted) as url:
        engine = VllmEngine(url)
        try:
            async with gateway(await served(engine, policy_renderer), tmp_path / "capture.db") as running:
                opened = await running.sessions.open(task_id="t", profile=HarnessProfile(), sampling=SamplingSpec())
                address = f"{running.base_url(opened.key)}/v1/chat/completions"
                body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
                async with aiohttp.request("POST", address, json=body) as reply:
                    await chunk_with(reply, "word")
                    await engine.pause("keep")
                    said = len(scripted.log[0].ids)
                    for _ in range(5):
                        await chunk_with(reply, '"choices":[]')
                    assert len(scripted.log[0].ids) <= said + 1, "it is paused"
                    await engine.update_version(7)
                    await engine.reset_prefix_cache()
                    await engine.resume()
                    rest = await reply.text()
                assert json.loads(rest.split("data: ")[-2])["choices"][0]["finish_reason"] == "stop"
                await running.sessions.freeze(opened.session_id)
        finally:
            await engine.close()
    captured = read_captured(tmp_path / "capture.db", opened.session_id)
    assert captured.calls[0].status == "ok"
    assert [span.policy_version for span in captured.nodes[captured.calls[0].choices[0].node or 0].versions] == [0, 7]


async def chunk_with(reply: aiohttp.ClientResponse, text: str) -> bytes:
    """The next event that says `text`."""
    while text.encode() not in (line := await reply.content.readline()):
        assert line, "the stream has ended"
    return line


async def test_a_session_of_many_traces_weighs_as_much_as_one_of_one(serve: Serve) -> None:
    def reply(call: ScriptedCall) -> Scripted:
        return Scripted("short" if "one" in call.prompt_text else "rather a long answer " * 5)

    weights = []
    async with serve(reply) as stand:
        for questions in (["one"], ["one", "two", "three"]):
            session_id, key = await stand.open()
            for question in questions:
                await Conversation(stand.client(key), [{"role": "user", "content": question}], tools=None).ask()
            trajectory = build(await stand.captured(session_id), builder="per_request", status="completed", reward=1.0)
            assert len(trajectory.traces) == len(questions)
            weights.append(sum(trace.weight for trace in trajectory.traces))
            share = [int(trace.loss_mask.sum()) / trajectory.accounting.trained for trace in trajectory.traces]
            assert [trace.weight for trace in trajectory.traces] == pytest.approx(share)
    assert weights == pytest.approx([1.0, 1.0])
