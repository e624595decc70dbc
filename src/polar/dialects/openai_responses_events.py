"""One streamed reply as the events of OpenAI's Responses API.

Codex runs a tool as soon as its `response.output_item.done` arrives: items of calls are written in `finish`, as is the end of
the message. Reasoning ends where text begins.
"""

from typing import Literal

from polar.chat import ChatRequest, Delta, ReasoningDelta, Reply
from polar.dialects.openai_common import sse
from polar.dialects.openai_responses_output import (
    OUTCOMES,
    Item,
    call_item,
    message_item,
    reasoning_item,
    response,
    says_nothing,
    text_part,
    whole_response,
)
from polar.dialects.protocol import EVENT_STREAM, Fault, FaultKind

# Codes that harnesses tell apart: Codex compacts on the first, gives up on the second, and asks again on others.
_CODES: dict[FaultKind, str] = {"context_length": "context_length_exceeded", "invalid": "invalid_prompt"}
_NO_SUMMARY: Item = {"type": "summary_text", "text": ""}
_NO_TEXT: Item = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


class ResponseEvents:
    """Writes the events, and numbers them and the items. One item is open at a time."""

    content_type = EVENT_STREAM

    def __init__(self, request: ChatRequest, call_id: str, created: int) -> None:
        self._request = request
        self._call_id = call_id
        self._created = created
        self._events = 0
        self._ended = 0  # items
        self._open: Literal["reasoning", "message", "call"] | None = None
        self._item_id: object = None
        self._thoughts: list[str] = []

    def start(self) -> bytes:
        begun = response(self._request, self._call_id, self._created, "in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def delta(self, delta: Delta) -> bytes:
        if isinstance(delta, ReasoningDelta):
            begun = self._begin_reasoning() if self._open is None else b""
            self._thoughts.append(delta.text)
            return begun + self._inner("response.reasoning_summary_text.delta", summary_index=0, delta=delta.text)
        begun = b"" if self._open == "message" else self._end_reasoning() + self._begin_message()
        return begun + self._inner("response.output_text.delta", content_index=0, delta=delta.text, logprobs=[])

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def finish(self, reply: Reply) -> bytes:
        choice, outcome = reply.choices[0], OUTCOMES[reply.finish_reason]
        events = [self._begin_message()] if says_nothing(choice) else []
        if self._open == "message":
            events.append(self._end_message(text_part(self._request, choice), outcome))
        else:
            events.append(self._end_reasoning())
        for index, call in enumerate(choice.message.tool_calls):
            events.append(self._call(call_item(self._request.tools, self._call_id, index, call)))
        events.append(self._event(f"response.{outcome}", response=whole_response(self._request, reply)))
        return b"".join(events)

    def error(self, fault: Fault) -> bytes:
        told = {"code": _CODES.get(fault.kind, "server_error"), "message": fault.message}
        failed = response(self._request, self._call_id, self._created, "failed") | {"error": told}
        return self._event("response.failed", response=failed)

    def _begin_reasoning(self) -> bytes:
        added = self._begin("reasoning", reasoning_item(self._call_id))
        return added + self._inner("response.reasoning_summary_part.added", summary_index=0, part=_NO_SUMMARY)

    def _end_reasoning(self) -> bytes:
        if self._open != "reasoning":
            return b""
        text = "".join(self._thoughts)
        done = self._inner("response.reasoning_summary_text.done", summary_index=0, text=text)
        part = self._inner("response.reasoning_summary_part.done", summary_index=0, part=_NO_SUMMARY | {"text": text})
        return done + part + self._end(reasoning_item(self._call_id, text))

    def _begin_message(self) -> bytes:
        added = self._begin("message", message_item(self._call_id, "in_progress", []))
        return added + self._inner("response.content_part.added", content_index=0, part=_NO_TEXT)

    def _end_message(self, part: Item, outcome: str) -> bytes:
        told = {"text": part["text"], "logprobs": part["logprobs"]}
        done = self._inner("response.output_text.done", content_index=0, **told)
        closed = self._inner("response.content_part.done", content_index=0, part=part)
        return done + closed + self._end(message_item(self._call_id, outcome, [part]))

    def _call(self, item: Item) -> bytes:
        """A call in one delta: it is whole by now."""
        custom = item["type"] == "custom_tool_call"
        field, name = ("input", "custom_tool_call_input") if custom else ("arguments", "function_call_arguments")
        added = self._begin("call", item | {field: "", "status": "in_progress"})
        delta = self._inner(f"response.{name}.delta", delta=item[field])
        told = {field: item[field]} if custom else {"name": item["name"], field: item[field]}
        return added + delta + self._inner(f"response.{name}.done", **told) + self._end(item)

    def _begin(self, kind: Literal["reasoning", "message", "call"], item: Item) -> bytes:
        self._open, self._item_id = kind, item["id"]
        return self._event("response.output_item.added", output_index=self._ended, item=item)

    def _end(self, item: Item) -> bytes:
        event = self._event("response.output_item.done", output_index=self._ended, item=item)
        self._open, self._ended = None, self._ended + 1
        return event

    def _inner(self, event: str, **fields: object) -> bytes:
        """An event within the open item."""
        return self._event(event, item_id=self._item_id, output_index=self._ended, **fields)

    def _event(self, event: str, **fields: object) -> bytes:
        numbered: Item = {"type": event, "sequence_number": self._events, **fields}
        self._events += 1
        return sse(event, numbered)
