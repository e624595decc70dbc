"""Replies of Gemini, whole or streamed.

Calls have no place for arguments that are not a JSON object: they go out as `{"INVALID_JSON": "<what the model wrote>"}`, and
are unwrapped when they come back under an identifier of ours. The first part of each sort (thought, text, call) has our
signature as its `thoughtSignature`: clients merge parts and drop thoughts, and keep the signature of what they keep.
"""

from typing import Literal

import msgspec
from msgspec import Raw, Struct

from polar.chat import ChatRequest, Delta, ReasoningDelta, Reply, ToolCall
from polar.dialects.arguments import wrapped
from polar.dialects.ascii import encode
from polar.dialects.protocol import EVENT_STREAM, JSON, Fault, FaultKind
from polar.ids import response_id, signature

Sort = Literal["thought", "text", "call"]
ALT_SSE = Raw(b'"sse"')

_STATUS: dict[FaultKind, tuple[int, str]] = {
    "invalid": (400, "INVALID_ARGUMENT"),
    "context_length": (400, "INVALID_ARGUMENT"),
    "unauthorized": (401, "UNAUTHENTICATED"),
    "not_found": (404, "NOT_FOUND"),
    "frozen": (409, "FAILED_PRECONDITION"),
    "unavailable": (503, "UNAVAILABLE"),
    "internal": (500, "INTERNAL"),
}


class _Thinking(Struct, rename="camel"):
    include_thoughts: bool | None = None


def whole_reply(request: ChatRequest, reply: Reply) -> bytes:
    """Body of a reply that is not streamed."""
    parts = _Parts(reply.call_id)
    said: list[dict[str, object]] = []
    if reply.message.reasoning and wants_thoughts(request):
        said.append(parts.thought(reply.message.reasoning))
    if reply.message.text:
        said.append(parts.text(reply.message.text))
    said += [parts.call(call) for call in reply.message.tool_calls]
    return encode(_ending(reply, said or [parts.text("")]))


def wants_thoughts(request: ChatRequest) -> bool:
    """Thoughts are parts that only clients that asked for them know to tell from text."""
    thinking = request.extra.get("thinkingConfig")
    return thinking is not None and bool(msgspec.json.decode(thinking, type=_Thinking).include_thoughts)


def status(fault: Fault) -> int:
    """HTTP status of a fault."""
    return _STATUS[fault.kind][0]


def error_body(fault: Fault) -> dict[str, object]:
    """The shape of every error. Clients know a prompt that is too long by Google's sentence."""
    message = fault.message
    if fault.kind == "context_length" and fault.max_model_len:
        asked, most = fault.prompt_tokens, fault.max_model_len
        message = f"The input token count ({asked}) exceeds the maximum number of tokens allowed ({most})."
    return {"error": {"code": status(fault), "message": message, "status": _STATUS[fault.kind][1]}}


class _Parts:
    """Writes the parts of one reply."""

    def __init__(self, call_id: str) -> None:
        self._signature = signature(call_id, 0)
        self._signed: set[Sort] = set()

    def thought(self, text: str) -> dict[str, object]:
        return {"text": text, "thought": True, **self._sign("thought")}

    def text(self, text: str) -> dict[str, object]:
        return {"text": text, **self._sign("text")}

    def call(self, call: ToolCall) -> dict[str, object]:
        return {"functionCall": {"id": call.id, "name": call.name, "args": _args(call)}, **self._sign("call")}

    def _sign(self, sort: Sort) -> dict[str, object]:
        if sort in self._signed:
            return {}
        self._signed.add(sort)
        return {"thoughtSignature": self._signature}


class ReplyEvents:
    """One streamed reply: server-sent events with `alt=sse`, else the elements of one JSON array."""

    def __init__(self, request: ChatRequest, call_id: str) -> None:
        self._head: dict[str, object] = {"modelVersion": request.model, "responseId": response_id(call_id)}
        self._parts = _Parts(call_id)
        self._thoughts = wants_thoughts(request)
        self._sse = request.extra.get("alt") == ALT_SSE
        self._written = 0
        self.content_type = EVENT_STREAM if self._sse else JSON

    def start(self) -> bytes:
        return b"" if self._sse else b"["

    def delta(self, delta: Delta) -> bytes:
        if not isinstance(delta, ReasoningDelta):
            return self._chunk(self._parts.text(delta.text))
        return self._chunk(self._parts.thought(delta.text)) if self._thoughts else self.keep_alive()

    def keep_alive(self) -> bytes:
        """An empty line, which every reader skips: the SDKs take a comment for a broken chunk, and show chunks to their users."""
        return b"\n"

    def finish(self, reply: Reply) -> bytes:
        calls = [self._parts.call(call) for call in reply.message.tool_calls]
        ending = self._written_out(_ending(reply, calls or [self._parts.text("")]))
        return ending if self._sse else ending + b"]\n"

    def error(self, fault: Fault) -> bytes:
        """As the API writes it: bare JSON even among events, which all SDKs raise on (older ones not on an event of it)."""
        body = error_body(fault)
        return encode(body) + b"\n" if self._sse else self._written_out(body) + b"]\n"

    def _chunk(self, part: dict[str, object]) -> bytes:
        return self._written_out({"candidates": [_candidate([part])], **self._head})

    def _written_out(self, body: dict[str, object]) -> bytes:
        if self._sse:
            return b"data: " + encode(body) + b"\n\n"
        comma = b"," if self._written else b""
        self._written += 1
        return comma + encode(body) + b"\n"


def _ending(reply: Reply, parts: list[dict[str, object]]) -> dict[str, object]:
    prompt, completion = reply.usage.prompt_tokens, reply.usage.completion_tokens
    usage = {"promptTokenCount": prompt, "candidatesTokenCount": completion, "totalTokenCount": prompt + completion}
    return {
        "candidates": [{**_candidate(parts), "finishReason": "MAX_TOKENS" if reply.finish_reason == "length" else "STOP"}],
        "usageMetadata": usage,
        "modelVersion": reply.model,
        "responseId": response_id(reply.call_id),
    }


def _candidate(parts: list[dict[str, object]]) -> dict[str, object]:
    return {"content": {"role": "model", "parts": parts}, "index": 0}


def _args(call: ToolCall) -> Raw:
    """The arguments as a compact JSON object."""
    return Raw(msgspec.json.format(wrapped(call.arguments).encode(), indent=-1))
