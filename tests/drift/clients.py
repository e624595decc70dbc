"""Harnesses in miniature, one per dialect, each through the dialect's own SDK, with the habits that harnesses have.

They send a history that means the same as what was said, and is spelled otherwise: arguments re-serialised, reasoning dropped,
text trimmed and cut into parts.
"""

import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Protocol

import anthropic
import openai
from google import genai
from google.genai import types
from msgspec import Struct

from tests.drift.dialogues import DESCRIPTION, TOOLS, Dialogue, Turn

Json = dict[str, Any]
ANY_KEY = "any"
REPLY = 4000  # tokens that a client asks for at most


class Habits(Struct, frozen=True):
    """What a client does to its history before it sends it again.

    Attributes:
        respells: writes arguments anew: other spacing, other order of keys.
        forgets: drops reasoning.
        trims: drops whitespace around text.
        splits: sends text in parts.
        streams: asks for a stream.
    """

    respells: bool
    forgets: bool
    trims: bool
    splits: bool
    streams: bool


def habits(number: int) -> Habits:
    """Those of the client of a dialogue: each mixture of them is met once in 32 dialogues."""
    return Habits(*(bool(number >> bit & 1) for bit in range(5)))


class Called(Struct, frozen=True):
    """A tool call as a client read it."""

    id: str
    name: str
    arguments: Json


class Client(Protocol):
    """One history; `called` are the calls of its last reply."""

    called: list[Called]

    async def ask(self) -> None:
        """One call; the reply joins the history as this client keeps it."""
        ...

    def hear(self, turn: Turn) -> None:
        """What comes after a reply joins the history: results of its calls, and the user's words."""
        ...


class _Talk:
    """What the clients share."""

    def __init__(self, dialogue: Dialogue, habits: Habits) -> None:
        self.dialogue = dialogue
        self.habits = habits
        self.called: list[Called] = []
        self._rng = random.Random(dialogue.number)

    def arguments(self, text: str) -> str:
        """Arguments as text, in this client's spelling."""
        if not self.habits.respells:
            return text
        separators = self._rng.choice(((",", ":"), (", ", ": ")))
        return json.dumps(self.values(json.loads(text)), separators=separators, ensure_ascii=self._rng.random() < 0.5)

    def values(self, arguments: Json) -> Json:
        """Arguments as an object, perhaps in another order of keys."""
        names = sorted(arguments, reverse=self._rng.random() < 0.5) if self.habits.respells else list(arguments)
        return {name: arguments[name] for name in names}

    def text(self, text: str) -> str:
        return text.strip() if self.habits.trims else text

    def texts(self, text: str) -> list[str]:
        """Text in the parts in which it is sent; none for the empty text."""
        at = self._rng.randrange(len(text) + 1) if self.habits.splits else 0
        return [part for part in (text[:at], text[at:]) if part]


class Chat(_Talk):
    """OpenAI Chat Completions."""

    def __init__(self, sdk: openai.AsyncOpenAI, url: str, dialogue: Dialogue, habits: Habits) -> None:
        super().__init__(dialogue, habits)
        self._sdk = sdk.with_options(base_url=f"{url}/v1")
        self._messages: list[Any] = [_said("system", dialogue.system), _said("user", dialogue.first)]
        self._tools: list[Any] = [
            {"type": "function", "function": {"name": name, "description": DESCRIPTION, "parameters": _schema(name)}}
            for name in TOOLS
        ]

    async def ask(self) -> None:
        request: Json = {"model": "policy", "messages": self._messages, "tools": self._tools}
        message = await (self._streamed(request) if self.habits.streams else self._whole(request))
        calls = message.pop("tool_calls", None) or []
        self.called = [Called(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
        for call in calls:
            call["function"]["arguments"] = self.arguments(call["function"]["arguments"])
        content = self.text(message["content"] or "")
        kept: Json = {"role": "assistant", "content": _text_parts(self.texts(content)) if self.habits.splits else content}
        if calls:
            kept["tool_calls"] = calls
        if not self.habits.forgets and message.get("reasoning_content"):
            kept["reasoning_content"] = message["reasoning_content"]
        self._messages.append(kept)

    def hear(self, turn: Turn) -> None:
        for call, result in zip(self.called, turn.results, strict=True):
            self._messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if turn.user:
            self._messages.append(_said("user", turn.user))

    async def _whole(self, request: Json) -> Json:
        reply = await self._sdk.chat.completions.create(**request)
        message: Json = reply.choices[0].message.model_dump(exclude_none=True)
        return {"content": "", **message}

    async def _streamed(self, request: Json) -> Json:
        message: Json = {"content": "", "reasoning_content": "", "tool_calls": []}
        async for chunk in await self._sdk.chat.completions.create(**request, stream=True):
            for choice in chunk.choices:
                delta = choice.delta.model_dump(exclude_none=True)
                message["content"] += delta.get("content", "")
                message["reasoning_content"] += delta.get("reasoning_content", "")
                message["tool_calls"] += [
                    {key: call[key] for key in call if key != "index"} for call in delta.get("tool_calls", [])
                ]
        return message


class Responses(_Talk):
    """OpenAI Responses; the client keeps all items."""

    def __init__(self, sdk: openai.AsyncOpenAI, url: str, dialogue: Dialogue, habits: Habits) -> None:
        super().__init__(dialogue, habits)
        self._sdk = sdk.with_options(base_url=f"{url}/v1")
        self._items: list[Any] = [_said("user", dialogue.first)]
        self._tools: list[Any] = [
            {"type": "function", "name": name, "description": DESCRIPTION, "parameters": _schema(name), "strict": False}
            for name in TOOLS
        ]

    async def ask(self) -> None:
        request: Json = {
            "model": "policy",
            "instructions": self.dialogue.system,
            "input": self._items,
            "tools": self._tools,
            "store": False,
            "include": ["reasoning.encrypted_content"],
        }
        response = await (self._streamed(request) if self.habits.streams else self._sdk.responses.create(**request))
        items = [item.model_dump(exclude_none=True) for item in response.output]
        self.called = [
            Called(item["call_id"], item["name"], json.loads(item["arguments"]))
            for item in items
            if item["type"] == "function_call"
        ]
        self._items += [kept for item in items if (kept := self._kept(item))]

    def hear(self, turn: Turn) -> None:
        for call, result in zip(self.called, turn.results, strict=True):
            self._items.append({"type": "function_call_output", "call_id": call.id, "output": result})
        if turn.user:
            self._items.append(_said("user", turn.user))

    def _kept(self, item: Json) -> Json | None:
        if item["type"] == "reasoning":
            return None if self.habits.forgets else item
        if item["type"] == "function_call":
            return {**item, "arguments": self.arguments(item["arguments"])}
        text = self.text("".join(part["text"] for part in item["content"]))
        return {**item, "content": [{"type": "output_text", "text": part, "annotations": []} for part in self.texts(text)]}

    async def _streamed(self, request: Json) -> Any:
        ended = None
        async for event in await self._sdk.responses.create(**request, stream=True):
            if event.type in ("response.completed", "response.incomplete"):
                ended = event.response
        return ended


class Messages(_Talk):
    """Anthropic Messages."""

    def __init__(self, sdk: anthropic.AsyncAnthropic, url: str, dialogue: Dialogue, habits: Habits) -> None:
        super().__init__(dialogue, habits)
        self._sdk = sdk.with_options(base_url=url)
        self._messages: list[Any] = [_said("user", dialogue.first)]
        self._tools: list[Any] = [{"name": name, "description": DESCRIPTION, "input_schema": _schema(name)} for name in TOOLS]

    async def ask(self) -> None:
        request: Json = {
            "model": "policy",
            "max_tokens": REPLY,
            "system": [{"type": "text", "text": self.dialogue.system, "cache_control": {"type": "ephemeral"}}],
            "messages": self._messages,
            "tools": self._tools,
        }
        if self.habits.streams:
            async with self._sdk.messages.stream(**request) as stream:
                reply: Any = await stream.get_final_message()
        else:
            reply = await self._sdk.messages.create(**request)
        blocks = [block.model_dump(exclude_none=True) for block in reply.content]
        self.called = [Called(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        self._messages.append({"role": "assistant", "content": [kept for block in blocks for kept in self._kept(block)]})

    def hear(self, turn: Turn) -> None:
        content: list[Json] = [
            {"type": "tool_result", "tool_use_id": call.id, "content": result}
            for call, result in zip(self.called, turn.results, strict=True)
        ]
        if turn.user:
            content.append({"type": "text", "text": turn.user})
        self._messages.append({"role": "user", "content": content})

    def _kept(self, block: Json) -> list[Json]:
        if block["type"] == "thinking":
            return [] if self.habits.forgets else [block]
        if block["type"] == "tool_use":
            return [
                {key: self.values(block["input"]) if key == "input" else block[key] for key in ("type", "id", "name", "input")}
            ]
        return _text_parts(self.texts(self.text(block["text"])))


class Gemini(_Talk):
    """Gemini's generateContent."""

    def __init__(self, sdk: genai.Client, url: str, dialogue: Dialogue, habits: Habits) -> None:
        super().__init__(dialogue, habits)
        self._models = sdk.aio.models
        self._contents: list[Any] = [types.Content(role="user", parts=[types.Part(text=dialogue.first)])]
        self._config = types.GenerateContentConfig(
            http_options=types.HttpOptions(base_url=url),
            system_instruction=dialogue.system,
            tools=[types.Tool(function_declarations=[_declaration(name) for name in TOOLS])],
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
            thinking_config=types.ThinkingConfig(include_thoughts=True),
        )

    async def ask(self) -> None:
        request: Json = {"model": "policy", "contents": self._contents, "config": self._config}
        if self.habits.streams:
            chunks = [chunk async for chunk in await self._models.generate_content_stream(**request)]
        else:
            chunks = [await self._models.generate_content(**request)]
        parts = _merged([part for chunk in chunks for part in chunk.parts or []])
        calls = [part.function_call for part in parts if part.function_call]
        self.called = [Called(call.id or "", call.name or "", call.args or {}) for call in calls]
        self._contents.append(types.Content(role="model", parts=[kept for part in parts for kept in self._kept(part)]))

    def hear(self, turn: Turn) -> None:
        parts = [
            types.Part(function_response=types.FunctionResponse(id=call.id, name=call.name, response={"output": result}))
            for call, result in zip(self.called, turn.results, strict=True)
        ]
        if turn.user:
            parts.append(types.Part(text=turn.user))
        self._contents.append(types.Content(role="user", parts=parts))

    def _kept(self, part: types.Part) -> list[types.Part]:
        if part.thought:
            return [] if self.habits.forgets else [part]
        if call := part.function_call:
            return [part.model_copy(update={"function_call": call.model_copy(update={"args": self.values(call.args or {})})})]
        return [part.model_copy(update={"text": text}) for text in self.texts(self.text(part.text or ""))]


def _merged(parts: Sequence[types.Part]) -> list[types.Part]:
    """Texts that follow each other as one, as a client keeps a stream."""
    merged: list[types.Part] = []
    for part in parts:
        before = merged[-1] if merged else None
        if before is not None and before.text and part.text and before.thought == part.thought:
            signature = part.thought_signature or before.thought_signature
            merged[-1] = before.model_copy(update={"text": before.text + part.text, "thought_signature": signature})
        else:
            merged.append(part)
    return merged


def _said(role: str, text: str) -> Json:
    return {"role": role, "content": text}


def _text_parts(texts: Sequence[str]) -> list[Json]:
    return [{"type": "text", "text": text} for text in texts]


def _schema(name: str) -> Json:
    return {"type": "object", "properties": TOOLS[name]}


def _declaration(name: str) -> types.FunctionDeclaration:
    return types.FunctionDeclaration(name=name, description=DESCRIPTION, parameters_json_schema=_schema(name))


# One SDK serves all clients of a probe: each brings its own connections and certificates.
Open = Callable[[str, Dialogue, Habits], Client]


@asynccontextmanager
async def openai_chat() -> AsyncIterator[Open]:
    async with openai.AsyncOpenAI(api_key=ANY_KEY, max_retries=0) as sdk:
        yield partial(Chat, sdk)


@asynccontextmanager
async def openai_responses() -> AsyncIterator[Open]:
    async with openai.AsyncOpenAI(api_key=ANY_KEY, max_retries=0) as sdk:
        yield partial(Responses, sdk)


@asynccontextmanager
async def anthropic_messages() -> AsyncIterator[Open]:
    async with anthropic.AsyncAnthropic(api_key=ANY_KEY, max_retries=0) as sdk:
        yield partial(Messages, sdk)


@asynccontextmanager
async def gemini() -> AsyncIterator[Open]:
    sdk = genai.Client(api_key=ANY_KEY)
    try:
        yield partial(Gemini, sdk)
    finally:
        await sdk.aio.aclose()


CLIENTS: dict[str, Callable[[], AbstractAsyncContextManager[Open]]] = {
    "openai_chat": openai_chat,
    "openai_responses": openai_responses,
    "anthropic_messages": anthropic_messages,
    "gemini": gemini,
}
