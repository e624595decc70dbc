"""Who may call, and what is refused, in the dialect's own shape."""

import asyncio
from typing import Any

import aiohttp
import openai
import pytest
from msgspec import structs

from polar.audit.session import prove_session
from polar.engines.protocol import EngineInfo
from polar.engines.scripted import Scripted
from polar.engines.vllm import VllmEngine
from polar.errors import UsageError
from polar.gateway import app
from polar.gateway.gateway import gateway
from polar.specs import HarnessProfile, KindRule, SamplingSpec
from polar.trajectory.builders import build
from tests.gateway.conftest import Serve
from tests.gateway.conversation import Conversation


async def test_a_session_is_found_by_path_or_by_api_key(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        session_id, key = await stand.open()
        for client in (stand.client(key), openai.AsyncOpenAI(base_url=f"{stand.gateway.url}/v1", api_key=key, max_retries=0)):
            assert (await Conversation(client, tools=None).ask())["content"] == "Hello."
        assert len((await stand.captured(session_id)).calls) == 2


async def test_an_unknown_key_is_401_and_mints_nothing(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        with pytest.raises(openai.AuthenticationError, match="no session has this key"):
            await Conversation(stand.client("pk-guess")).ask()
        assert list(stand.gateway.sessions) == []
        assert stand.log == []


async def test_a_frozen_session_is_409(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        session_id, key = await stand.open()
        await stand.gateway.sessions.freeze(session_id)
        with pytest.raises(openai.ConflictError, match="closed to further calls"):
            await Conversation(stand.client(key)).ask()


async def test_freezing_ends_what_is_being_generated(serve: Serve) -> None:
    async with serve(lambda call: Scripted("word " * 400, delay_per_token=0.01)) as stand:
        session_id, key = await stand.open()
        asking = asyncio.create_task(Conversation(stand.client(key)).ask())
        while not stand.log or not stand.log[0].ids:
            await asyncio.sleep(0.01)
        captured = await stand.captured(session_id)
        assert [call.status for call in captured.calls] == ["aborted"]
        with pytest.raises(openai.InternalServerError, match="aborted"):
            await asking


async def test_a_prompt_without_room_is_a_context_length_error_and_never_trimmed(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello."), max_model_len=200) as stand:
        session_id, key = await stand.open()
        with pytest.raises(openai.BadRequestError) as refused:
            await Conversation(stand.client(key), [{"role": "user", "content": "word " * 300}], None).ask()
        assert refused.value.code == "context_length_exceeded"
        assert stand.log == []
        (call,) = (await stand.captured(session_id)).calls
        assert (call.status, call.findings[0].code) == ("failed", "context_length_exceeded")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"n": 99}, "n"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
async def test_what_would_change_the_reply_is_refused_by_name(serve: Serve, extra: dict[str, Any], says: str) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        _, key = await stand.open()
        with pytest.raises(openai.BadRequestError, match=says):
            await Conversation(stand.client(key)).ask(**extra)
        assert stand.log == []


BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b"[]", "Expected `object`"),
    (b'{"messages":[]}', "at least one message"),
    (b'{"messages":[{"role":"wizard","content":"x"}]}', "messages\\[0\\].role"),
    (b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}', "image_url"),
    (b'{"messages":' + b"[" * 100_000, "not valid JSON"),
    (b'{"messages":[{"role":"assistant","function_call":{"name":"f"}}]}', "function_call is not served"),
    (b'{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"web_search"}]}', "'web_search' is not served"),
]


@pytest.mark.parametrize(("body", "says"), BAD_BODIES)
async def test_a_malformed_body_is_400_and_says_what_is_wrong(serve: Serve, body: bytes, says: str) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand, aiohttp.ClientSession() as http:
        session_id, key = await stand.open()
        async with http.post(f"{stand.gateway.base_url(key)}/v1/chat/completions", data=body) as reply:
            assert reply.status == 400
            message = (await reply.json())["error"]["message"]
        import re

        assert re.search(says, message)
        assert stand.gateway.sessions.by_id(session_id).refused == message


async def test_half_a_surrogate_pair_is_read_as_a_replacement_character(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand, aiohttp.ClientSession() as http:
        session_id, key = await stand.open()
        body = b'{"messages":[{"role":"user","content":"cut \\ud83d"}]}'
        async with http.post(f"{stand.gateway.base_url(key)}/v1/chat/completions", data=body) as reply:
            assert reply.status == 200
        captured = await stand.captured(session_id)
        assert captured.messages[captured.calls[0].message_hashes[0]].text == "cut \ufffd"


async def test_an_unknown_route_is_404_and_health_is_200(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand, aiohttp.ClientSession() as http:
        _, key = await stand.open()
        async with http.post(f"{stand.gateway.base_url(key)}/v1/embeddings", data=b"{}") as reply:
            assert reply.status == 404
            assert (await reply.json())["error"]["code"] == "unknown_url"
        async with http.get(f"{stand.gateway.url}/health") as reply:
            assert reply.status == 200
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect(f"{stand.gateway.base_url(key)}/v1/chat/completions")
        assert refused.value.status == 404
        async with http.post(f"{stand.gateway.url}/sessions", data=b"{}") as reply:
            assert reply.status == 401  # control routes are not there without a control key


async def test_unknown_fields_are_kept_on_the_call(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        session_id, key = await stand.open()
        await Conversation(stand.client(key)).ask(store=False, extra_body={"reasoning_effort": "high", "novelty": {"a": [1]}})
        (call,) = (await stand.captured(session_id)).calls
        kept = {name: bytes(raw) for name, raw in call.extra.items()}
        assert kept == {"store": b"false", "reasoning_effort": b'"high"', "novelty": b'{"a":[1]}'}


async def test_no_key_reaches_the_store(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        session_id, key = await stand.open()
        await Conversation(stand.client(key)).ask()
        await stand.captured(session_id)
        for file in stand.capture.parent.glob("capture.db*"):
            assert key.encode() not in file.read_bytes()


async def test_a_slow_engine_gets_early_headers_and_keep_alives(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "HEADERS_AFTER", 0.1)
    monkeypatch.setattr(app, "KEEP_ALIVE_EVERY", 0.05)
    async with serve(lambda call: Scripted("Hello.", delay_per_token=0.4)) as stand, aiohttp.ClientSession() as http:
        _, key = await stand.open()
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        async with http.post(f"{stand.gateway.base_url(key)}/v1/chat/completions", json=body) as reply:
            text = await reply.text()
        events = [line for line in text.split("\n\n") if line]
        assert sum('"choices":[]' in event for event in events) >= 3
        assert events[-1] == "data: [DONE]"


async def test_it_refuses_to_listen_elsewhere_without_a_control_key(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        with pytest.raises(UsageError, match="refusing to listen on 0.0.0.0 without a control key"):
            async with gateway(None, stand.capture, host="0.0.0.0"):  # type: ignore[arg-type]
                pass


async def test_a_route_that_nobody_serves_is_counted_without_the_key(serve: Serve) -> None:
    """C11, D20."""
    async with serve(lambda call: Scripted("Hello.")) as stand, aiohttp.ClientSession() as http:
        session_id, key = await stand.open()
        for _ in range(3):
            async with http.get(f"{stand.gateway.base_url(key)}/s/{key}/v1/foo") as reply:
                assert reply.status == 404
                assert key not in await reply.text()
        async with http.post(f"{stand.gateway.base_url(key)}/v1/responses/compact", json={}) as reply:
            assert reply.status == 404
        findings = stand.gateway.sessions.by_id(session_id).findings()
        assert [(finding.code, finding.message) for finding in findings] == [
            ("unknown_route", "GET /s/(model key)/v1/foo, 3 ×"),
            ("unknown_route", "POST /v1/responses/compact, 1 ×"),
        ]


async def test_of_very_many_unknown_routes_only_the_first_are_named(serve: Serve) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand, aiohttp.ClientSession() as http:
        session_id, key = await stand.open()
        for number in range(60):
            async with http.get(f"{stand.gateway.base_url(key)}/{number}") as reply:
                assert reply.status == 404
        findings = stand.gateway.sessions.by_id(session_id).findings()
        assert len(findings) == 51
        assert findings[-1].message == "other routes, 10 ×"


@pytest.mark.parametrize(
    ("profile", "sampling", "says"),
    [
        (HarnessProfile(kinds=(KindRule("compaction", system="(["),)), SamplingSpec(), r"profile.kinds\[0\].system"),
        (HarnessProfile(retry_grace=-5), SamplingSpec(), "profile.retry_grace"),
        (HarnessProfile(), SamplingSpec(temperature=-1), "sampling.temperature"),
        (HarnessProfile(), SamplingSpec(top_p=0), "sampling.top_p"),
        (HarnessProfile(), SamplingSpec(top_k=-1), "sampling.top_k"),
        (HarnessProfile(), SamplingSpec(max_tokens=0), "sampling.max_tokens"),
    ],
)
async def test_a_session_that_could_not_be_served_is_not_opened(
    serve: Serve, profile: HarnessProfile, sampling: SamplingSpec, says: str
) -> None:
    async with serve(lambda call: Scripted("Hello.")) as stand:
        with pytest.raises(UsageError, match=says):
            await stand.open(profile, sampling)


async def test_tokens_of_tool_servers_are_not_stored(serve: Serve) -> None:
    """D20."""
    async with serve(lambda call: Scripted("Hello.")) as stand:
        session_id, key = await stand.open()
        servers = [{"type": "url", "url": "https://tools.example", "name": "tools", "authorization_token": "very-secret"}]
        body = {"model": "p", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "mcp_servers": servers}
        async with aiohttp.request("POST", f"{stand.gateway.base_url(key)}/v1/messages", json=body) as reply:
            assert reply.status == 200
        (call,) = (await stand.captured(session_id)).calls
        assert "mcp_servers" in call.unserved
        assert b"very-secret" not in b"".join(path.read_bytes() for path in stand.capture.parent.glob("capture.db*"))


@pytest.mark.parametrize("tools", [False, True])
async def test_a_schema_constrains_where_it_can_and_those_tokens_are_not_trained(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tools: bool
) -> None:
    """L05."""

    async def constraining(engine: VllmEngine) -> EngineInfo:
        return structs.replace(await told(engine), constrains=True)

    told = VllmEngine.info
    monkeypatch.setattr(VllmEngine, "info", constraining)
    async with serve(lambda call: Scripted('{"a": 1}')) as stand:
        session_id, key = await stand.open()
        talk = Conversation(stand.client(key))
        talk.tools = talk.tools if tools else None
        await talk.ask(response_format={"type": "json_object"})
        captured = await stand.captured(session_id)
        (call,) = captured.calls
        trajectory = build(captured, builder="prefix_merging", status="completed", reward=1.0)
        assert (call.constrained, call.unserved) == ((False, ("response_format",)) if tools else (True, ()))
        assert trajectory.accounting.excluded == ({} if tools else {"constrained": call.sampled})
        assert prove_session(captured, None, stand.renderer).findings == []
