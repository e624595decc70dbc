"""Replies of Anthropic Messages, whole or as events.

The API has no place for arguments that are not a JSON object: clients would break at them. They go out as Anthropic's own
guide says to wrap them, `{"INVALID_JSON": "<what the model wrote>"}`, and are unwrapped when they come back under our id.
"""

from typing import Literal

import msgspec
from msgspec import Raw

from polar.chat import ChatRequest, Choice, Delta, ReasoningDelta, Reply, ToolCall
from polar.dialects.arguments import unwrapped, wrapped
from polar.dialects.ascii import encode
from polar.dialects.protocol import EVENT_STREAM, Fault, FaultKind
from polar.ids import parse_minted, signature

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Claude Code asks again at any 5xx; at a 400 it gives up features.
_FAULTS: dict[FaultKind, tuple[int, str]] = {
    "invalid": (400, "invalid_request_error"),
    "context_length": (400, "invalid_request_error"),
    "unauthorized": (401, "authentication_error"),
    "not_found": (404, "not_found_error"),
    "frozen": (409, "invalid_request_error"),
    "unavailable": (503, "api_error"),
    "internal": (500, "api_error"),
}
_EMPTY_TEXT: dict[str, object] = {"type": "text", "text": ""}


def whole_reply(reply: Reply) -> bytes:
    """Body of a reply that is not streamed."""
    choice = reply.choices[0]
    return msgspec.json.encode(
        {
            **_head(reply.call_id, reply.model),
            "content": _content(reply.call_id, choice),
            "stop_reason": _stop_reason(choice),
            "stop_sequence": choice.stop_sequence or None,
            "usage": _usage(reply.usage.prompt_tokens, reply.usage.completion_tokens),
        }
    )


def fault_reply(fault: Fault) -> tuple[int, bytes]:
    """HTTP status and body of an error."""
    return _FAULTS[fault.kind][0], msgspec.json.encode({"type": "error", "error": _error(fault)})


def read_input(call_id: str, arguments: str) -> str:
    """The arguments of a tool call that came back as JSON object: what the model wrote, where we had to wrap it."""
    return unwrapped(arguments) if parse_minted(call_id) else arguments


class MessageEvents:
    """One streamed reply. Blocks open at their first delta; the policy's tokens are counted only at the end."""

    content_type = EVENT_STREAM

    def __init__(self, request: ChatRequest, call_id: str) -> None:
        self._model = request.model
        self._call_id = call_id
        self._open: Literal["", "thinking", "text"] = ""
        self._blocks = 0

    def start(self) -> bytes:
        message = {**_head(self._call_id, self._model), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**message, "usage": _usage(0, 0)})

    def delta(self, delta: Delta) -> bytes:
        if isinstance(delta, ReasoningDelta):
            return self._switch("thinking") + self._delta({"type": "thinking_delta", "thinking": delta.text})
        return self._switch("text") + self._delta({"type": "text_delta", "text": delta.text})

    def keep_alive(self) -> bytes:
        return _event("ping")

    def finish(self, reply: Reply) -> bytes:
        choice = reply.choices[0]
        events = [self._switch("")]
        events += [self._tool_use(call) for call in choice.message.tool_calls]
        if not self._blocks:
            events += [self._start(_EMPTY_TEXT), self._stop()]
        ending = {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stop_sequence or None}
        usage = _usage(reply.usage.prompt_tokens, reply.usage.completion_tokens)
        return b"".join([*events, _event("message_delta", delta=ending, usage=usage), _event("message_stop")])

    def error(self, fault: Fault) -> bytes:
        return _event("error", error=_error(fault))

    def _switch(self, kind: Literal["", "thinking", "text"]) -> bytes:
        """Close the open block and open one of `kind`, if that is another; "" only closes."""
        if kind == self._open:
            return b""
        events = b""
        if self._open == "thinking":
            events += self._delta({"type": "signature_delta", "signature": signature(self._call_id, 0)})
        if self._open:
            events += self._stop()
        self._open = kind
        if kind == "thinking":
            events += self._start({"type": "thinking", "thinking": "", "signature": ""})
        elif kind == "text":
            events += self._start(_EMPTY_TEXT)
        return events

    def _tool_use(self, call: ToolCall) -> bytes:
        started = self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        return started + self._delta({"type": "input_json_delta", "partial_json": wrapped(call.arguments)}) + self._stop()

    def _start(self, block: dict[str, object]) -> bytes:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, object]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _stop(self) -> bytes:
        return _event("content_block_stop", index=self._blocks - 1)


def _head(call_id: str, model: str) -> dict[str, object]:
    return {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "model": model}


def _content(call_id: str, choice: Choice) -> list[dict[str, object]]:
    """The blocks of a reply, at least one: scripts read the first without asking whether there is any."""
    message = choice.message
    blocks: list[dict[str, object]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature(call_id, 0)})
    if message.text:
        blocks.append({"type": "text", "text": message.text})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": Raw(wrapped(call.arguments).encode())}
        for call in message.tool_calls
    ]
    return blocks or [_EMPTY_TEXT]


def _error(fault: Fault) -> dict[str, object]:
    """Claude Code compacts at this wording of a prompt that is too long."""
    message = fault.message
    if fault.kind == "context_length":
        message = f"prompt is too long: {fault.prompt_tokens} tokens > {fault.max_model_len} maximum"
    return {"type": _FAULTS[fault.kind][1], "message": message}


def _stop_reason(choice: Choice) -> str:
    return "stop_sequence" if choice.stop_sequence else _STOP_REASONS[choice.finish_reason]


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "input_tokens": prompt,
        "output_tokens": completion,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _event(type: str, **fields: object) -> bytes:
    return b"".join((b"event: ", type.encode(), b"\ndata: ", encode({"type": type, **fields}), b"\n\n"))
