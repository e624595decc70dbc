"""W03, W04: weights change while a harness waits, and rewards reach traces."""

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

SAID = [{"role": "user", "content": "Hi"}]
APIS: dict[str, tuple[str, dict[str, object], str, str]] = {  # path, body, keep-alive, and what the last events say
    "chat": ("/v1/chat/completions", {"messages": SAID, "stream": True}, '"choices":[]', '"finish_reason":"stop"'),
    "responses": ("/v1/responses", {"input": "Hi", "stream": True}, ": keep-alive", "response.completed"),
    "messages": ("/v1/messages", {"messages": SAID, "max_tokens": 4096, "stream": True}, "event: ping", "message_stop"),
    "gemini": (
        "/v1beta/models/policy:streamGenerateContent?alt=sse",
        {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]},
        "",
        '"finishReason":"STOP"',
    ),
}
PAUSE, EVERY = 30.0, app.KEEP_ALIVE_EVERY  # seconds
FASTER = 500.0  # than in life


@pytest.mark.parametrize("api", APIS)
async def test_a_pause_in_mid_generation_keeps_the_stream_alive_and_both_versions(
    policy_tokenizer: Tokenizer, policy_renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    """A pause of 30 seconds, 500 times faster: whoever waits hears something every ten."""
    monkeypatch.setattr(app, "HEADERS_AFTER", app.HEADERS_AFTER / FASTER)
    monkeypatch.setattr(app, "KEEP_ALIVE_EVERY", EVERY / FASTER)
    path, body, alive, end = APIS[api]
    scripted = ScriptedEngine(policy_tokenizer, lambda call: Scripted("word " * 100, delay_per_token=0.005))
    async with scripted_server(scripted) as url:
        engine = VllmEngine(url)
        try:
            async with gateway(await served(engine, policy_renderer), tmp_path / "capture.db") as running:
                opened = await running.sessions.open(task_id="t", profile=HarnessProfile(), sampling=SamplingSpec())
                body = {"model": "policy", **body}
                async with aiohttp.request("POST", running.base_url(opened.key) + path, json=body) as reply:
                    assert reply.status == 200
                    await chunk_with(reply, "word")
                    await engine.pause("keep")
                    said = len(scripted.log[0].ids)
                    for _ in range(int(PAUSE / EVERY)):
                        await chunk_with(reply, alive)
                    assert len(scripted.log[0].ids) <= said + 1, "it is paused"
                    await engine.update_version(7)
                    await engine.reset_prefix_cache()
                    await engine.resume()
                    rest = await reply.text()
                assert end in rest
                assert "error" not in rest.replace('"error":null', "")
                await running.sessions.freeze(opened.session_id)
        finally:
            await engine.close()
    captured = read_captured(tmp_path / "capture.db", opened.session_id)
    assert [call.status for call in captured.calls] == ["ok"]
    assert [span.policy_version for span in captured.nodes[captured.calls[0].choices[0].node or 0].versions] == [0, 7]


async def chunk_with(reply: aiohttp.ClientResponse, text: str) -> None:
    """The next chunk that says `text`; of an empty text the next one that says nothing."""
    while True:
        chunk = (await reply.content.readany()).decode()
        assert chunk, "the stream has ended"
        if text in chunk if text else not chunk.strip():
            return


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
