"""OpenAI Chat Completions: `POST …/chat/completions`, streamed or not, with tools and reasoning.

What would change the meaning of a reply and is not served is refused by name; every other unknown field is kept raw on
the call. Events are ASCII-escaped JSON: some clients break lines at U+2028.
"""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Literal
from urllib.parse import unquote

import msgspec
from msgspec import Meta, Raw, Struct

from polar.chat import (
    ChatRequest,
    Choice,
    Delta,
    Message,
    ReasoningDelta,
    Reply,
    RequestedSampling,
    Role,
    TextPart,
    Tool,
    ToolCall,
)
from polar.dialects.protocol import EVENT_STREAM, Fault, ModelCard, Route, Target
from polar.errors import InvalidRequest

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
# Pairs and other escapes are matched too, so that neither a pair is cut nor an escaped backslash taken for an escape.
_HALF = re.compile(
    rb"\\u[dD][89abAB]..\\u[dD][c-fC-F].."
    rb"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\xed[\xa0-\xbf][\x80-\xbf])"
    rb"|\\.",
    re.DOTALL,
)
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Limit = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class _Part(Struct):
    type: str
    text: str = ""
    refusal: str = ""


class _Function(Struct):
    name: str
    arguments: str = ""


class _ToolCall(Struct):
    function: _Function
    id: str = ""
    type: Literal["function"] = "function"


class _Message(Struct):
    role: str
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str = ""
    function_call: Raw = Raw(b"null")


class _ToolFunction(Struct):
    name: str
    description: str | None = None
    parameters: Raw = Raw(b"{}")


class _Tool(Struct):
    type: str
    function: _ToolFunction | None = None


class _StreamOptions(Struct):
    include_usage: bool = False


class _Body(Struct):
    messages: list[_Message]
    model: str = ""
    tools: list[_Tool] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    seed: Whole | None = None

    def sampling(self) -> RequestedSampling:
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return RequestedSampling(self.temperature, self.top_p, self.top_k, min(limits, default=None), self.seed)


class OpenAIChat:
    """The dialect; stateless."""

    name = "openai_chat"

    def route(self, target: Target) -> Route | None:
        path = target.path.removeprefix("/v1")
        if target.method == "POST":
            return Route("generate") if path == "/chat/completions" else None
        if path == "/models":
            return Route("models")
        model = path.removeprefix("/models/")
        return Route("models", unquote(model)) if model != path and model else None

    def claims(self, target: Target) -> bool:
        return True

    def parse(self, target: Target, body: bytes) -> ChatRequest:
        fields, wire = _decode(body)
        extra = {name: raw.copy() for name, raw in fields.items() if name not in _Body.__struct_fields__}
        hidden = _refuse_unserved(extra)
        if not wire.messages:
            raise InvalidRequest("messages: expected at least one message")
        return ChatRequest(
            model=wire.model,
            messages=tuple(_message(index, message) for index, message in enumerate(wire.messages)),
            tools=() if hidden else tuple(_tool(tool) for tool in wire.tools or ()),
            sampling=wire.sampling(),
            stream=bool(wire.stream),
            include_usage=wire.stream_options is not None and wire.stream_options.include_usage,
            extra=extra,
        )

    def reply(self, request: ChatRequest, reply: Reply) -> bytes:
        return msgspec.json.encode(
            {
                "id": f"chatcmpl-{reply.call_id}",
                "object": "chat.completion",
                "created": reply.created,
                "model": reply.model,
                "choices": [_choice_out(index, choice) for index, choice in enumerate(reply.choices)],
                "usage": _usage(reply),
            }
        )

    def events(self, request: ChatRequest, call_id: str, created: int) -> "ChatEvents":
        return ChatEvents(request, call_id, created)

    def fault(self, fault: Fault) -> tuple[int, bytes]:
        return _STATUS[fault.kind], msgspec.json.encode({"error": _error(fault)})

    def token_count(self, tokens: int) -> bytes:
        raise NotImplementedError("Chat Completions has no route that counts tokens")

    def models(self, route: Route, cards: Sequence[ModelCard]) -> bytes:
        data = [
            {"id": card.id, "object": "model", "created": card.created, "owned_by": "polar", "max_model_len": card.max_model_len}
            for card in cards
        ]
        return msgspec.json.encode(data[0] if route.model else {"object": "list", "data": data})


class ChatEvents:
    """One streamed reply as `chat.completion.chunk` events."""

    content_type = EVENT_STREAM

    def __init__(self, request: ChatRequest, call_id: str, created: int) -> None:
        self._include_usage = request.include_usage
        self._head = {"id": f"chatcmpl-{call_id}", "object": "chat.completion.chunk", "created": created, "model": request.model}

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> bytes:
        field = "reasoning_content" if isinstance(delta, ReasoningDelta) else "content"
        return self._chunk({field: delta.text})

    def keep_alive(self) -> bytes:
        return _event({**self._head, "choices": []})

    def finish(self, reply: Reply) -> bytes:
        calls = [{"index": index, **_call_out(call)} for index, call in enumerate(reply.message.tool_calls)]
        events = [self._chunk({"tool_calls": calls})] if calls else []
        events.append(self._chunk({}, reply.finish_reason))
        if self._include_usage:
            events.append(_event({**self._head, "choices": [], "usage": _usage(reply)}))
        return b"".join(events) + b"data: [DONE]\n\n"

    def error(self, fault: Fault) -> bytes:
        return _event({"error": _error(fault)})

    def _chunk(self, delta: dict[str, object], finish_reason: str | None = None) -> bytes:
        return _event({**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


# What may be said of a feature that is not served: everything else would change the reply, and is refused by name.
_HARMLESS: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "stop": (None, []),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "audio": (None,),
    "modalities": (None, ["text"]),
}


def _refuse_unserved(extra: dict[str, Raw]) -> bool:
    """Refuse what would change the reply and is not served; whether the tools are to be hidden (`tool_choice: none`)."""
    for name, harmless in _HARMLESS.items():
        if name in extra:
            value = _value(name, extra[name])
            if value not in harmless:
                raise InvalidRequest(f"{name}: {_short(value)} is not served by this gateway; leave the field out")
    return "tool_choice" in extra and _value("tool_choice", extra["tool_choice"]) == "none"


def _value(name: str, raw: Raw) -> object:
    try:
        value: object = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{name}: {error}") from None
    return value


def _decode(body: bytes) -> tuple[dict[str, Raw], _Body]:
    """All fields raw, and the known ones typed."""
    try:
        text = _whole_characters(body).decode()
        return msgspec.json.decode(text, type=dict[str, Raw]), msgspec.json.decode(text, type=_Body)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None


def _whole_characters(body: bytes) -> bytes:
    """The body with U+FFFD for each half of a surrogate pair, where JavaScript cut a string; all else byte for byte."""
    if not _SURROGATE.search(body):
        return body
    return _HALF.sub(lambda found: "\ufffd".encode() if found["half"] else found[0], body)


def _message(index: int, wire: _Message) -> Message:
    role = _ROLES.get(wire.role)
    if role is None:
        raise InvalidRequest(f"messages[{index}].role: expected one of {', '.join(_ROLES)}, got {wire.role!r}")
    if bytes(wire.function_call) != b"null":
        raise InvalidRequest(f"messages[{index}].function_call is not served; use tool_calls")
    calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in wire.tool_calls or ())
    reasoning = wire.reasoning_content or wire.reasoning or ""
    return Message(role, _content(index, wire.content), reasoning, calls, wire.tool_call_id)


def _content(index: int, content: str | list[_Part] | None) -> tuple[TextPart, ...]:
    if isinstance(content, str):
        return (TextPart(content),) if content else ()
    parts: list[TextPart] = []
    for part in content or ():
        if part.type not in ("text", "refusal"):
            raise InvalidRequest(f"messages[{index}].content: a part of type {part.type!r} is not served; the policy reads text")
        parts.append(TextPart(part.text or part.refusal))
    return tuple(parts)


def _tool(tool: _Tool) -> Tool:
    if tool.type != "function" or tool.function is None:
        raise InvalidRequest(f"tools: a tool of type {tool.type!r} is not served; expected 'function'")
    return Tool(tool.function.name, tool.function.description or "", tool.function.parameters.copy())


def _choice_out(index: int, choice: Choice) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": choice.message.text or None}
    if choice.message.reasoning:
        message["reasoning_content"] = choice.message.reasoning
    if choice.message.tool_calls:
        message["tool_calls"] = [_call_out(call) for call in choice.message.tool_calls]
    return {"index": index, "message": message, "finish_reason": choice.finish_reason, "logprobs": None}


def _call_out(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(reply: Reply) -> dict[str, int]:
    prompt, completion = reply.usage.prompt_tokens, reply.usage.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


_STATUS = {
    "invalid": 400,
    "context_length": 400,
    "unauthorized": 401,
    "not_found": 404,
    "frozen": 409,
    "unavailable": 503,
    "internal": 500,
}


def _error(fault: Fault) -> dict[str, object]:
    kind = "invalid_request_error" if _STATUS[fault.kind] < 500 else "server_error"
    return {"message": fault.message, "type": kind, "param": None, "code": fault.code}


def _event(body: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
