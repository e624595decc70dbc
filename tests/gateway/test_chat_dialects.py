"""Chat mode through each dialect, over the wire: what the engine says reaches the harness in its own words, and is recorded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from polar.audit.session import audit_session
from polar.engines.scripted import Scripted, ScriptedCall
from polar.trajectory.builders import build
from tests.gateway.conftest import Serve, Stand
from tests.gateway.conversation import call_text

Body = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
BASH = {"name": "bash", "parameters": SCHEMA}


@dataclass(frozen=True)
class Spoken:
    """A dialect: where it asks, whole and streamed, and how it says texts by the user and the model in turn, with one tool."""

    path: str
    streamed: str
    body: Callable[[list[str]], Body]


def messages(texts: list[str]) -> list[Body]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def contents(texts: list[str]) -> list[Body]:
    return [{"role": ("user", "model")[place % 2], "parts": [{"text": text}]} for place, text in enumerate(texts)]


def openai_chat(texts: list[str]) -> Body:
    return {"model": "m", "messages": messages(texts), "tools": [{"type": "function", "function": BASH}]}


def openai_responses(texts: list[str]) -> Body:
    return {"model": "m", "input": messages(texts), "tools": [{"type": "function"} | BASH]}


def anthropic(texts: list[str]) -> Body:
    tools = [{"name": "bash", "input_schema": SCHEMA}]
    return {"model": "m", "max_tokens": 99, "messages": messages(texts), "tools": tools}


def gemini(texts: list[str]) -> Body:
    return {"contents": contents(texts), "tools": [{"functionDeclarations": [BASH]}]}


GEMINI = "/v1beta/models/m:"
DIALECTS = {
    "openai_chat": Spoken("/v1/chat/completions", "/v1/chat/completions", openai_chat),
    "openai_responses": Spoken("/v1/responses", "/v1/responses", openai_responses),
    "anthropic_messages": Spoken("/v1/messages", "/v1/messages", anthropic),
    "gemini": Spoken(f"{GEMINI}generateContent", f"{GEMINI}streamGenerateContent?alt=sse", gemini),
}


async def ask(stand: Stand, key: str, name: str, texts: list[str], *, stream: bool) -> tuple[int, str]:
    """Status and bytes of one call."""
    spoken = DIALECTS[name]
    url = stand.gateway.base_url(key) + (spoken.streamed if stream else spoken.path)
    body = spoken.body(texts) | ({"stream": stream} if name != "gemini" else {})
    async with aiohttp.request("POST", url, json=body) as reply:
        return reply.status, await reply.text()


def policy(call: ScriptedCall) -> Scripted:
    return Scripted(call_text("ls", "So it is. ") if call.turn else "One.", tokens_per_chunk=99)


@pytest.mark.parametrize("name", DIALECTS)
async def test_each_dialect_is_told_what_the_engine_says(serve: Serve, name: str) -> None:
    async with serve(policy, chat=True) as stand:
        session_id, key = await stand.open()
        texts = ["Hi"]
        for stream, expected in ((True, ["One."]), (False, ["So it is.", "bash", "ls"])):
            status, said = await ask(stand, key, name, texts, stream=stream)
            assert (status, [word for word in expected if word not in said]) == (200, [])
            texts += ["One.", "Go on."]
        captured = await stand.captured(session_id)
        first, second = captured.calls
        assert (first.dialect, first.delivered, second.delivered) == (name, True, True)
        assert (second.parent_call, second.fork_reason) == (first.call_id, "retokenised")
        assert second.choices[0].message.tool_calls[0].id == f"call_{second.call_id}_0_0"
        assert audit_session(captured, None, None) == []
        accounting = build(captured, builder="prefix_merging", status="completed", reward=1.0).accounting
        assert accounting.trained == accounting.sampled == sum(len(entry.ids) for entry in stand.log)


@pytest.mark.parametrize("name", DIALECTS)
async def test_each_dialect_tells_of_a_prompt_that_is_too_long_in_its_own_words(serve: Serve, name: str) -> None:
    """T10: the engine refuses; nothing is trimmed, and nobody is told to try again."""
    async with serve(policy, chat=True, max_model_len=64) as stand:
        _, key = await stand.open()
        for stream in (True, False):
            status, said = await ask(stand, key, name, ["word " * 200], stream=stream)
            assert (status, "64" in said) == (400, True)
