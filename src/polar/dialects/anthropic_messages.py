"""Anthropic Messages: `POST …/v1/messages`, streamed or not, `count_tokens`, and the models as its clients list them.

The API shares `/v1/models` with others; its clients are known by the header `anthropic-version`.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from polar.chat import ChatRequest, Reply
from polar.dialects.anthropic_reply import MessageEvents, fault_reply, whole_reply
from polar.dialects.anthropic_request import parse_request
from polar.dialects.bodies import Memory
from polar.dialects.protocol import Fault, ModelCard, Route, Target

_VERSION = "anthropic-version"
_OWN_PATHS = ("/messages", "/complete")
_CLAUDE_CODE_PATHS = ("/api/hello", "/api/claude_", "/api/event_logging", "/api/oauth")


class AnthropicMessages:
    """The dialect; stateless."""

    name = "anthropic_messages"

    def route(self, target: Target) -> Route | None:
        path = target.path.removeprefix("/v1")
        if target.method == "POST":
            return {"/messages": Route("generate"), "/messages/count_tokens": Route("count_tokens")}.get(path)
        if target.method not in ("GET", "HEAD") or _VERSION not in target.headers:
            return None
        if path == "/models":
            return Route("models")
        model = path.removeprefix("/models/")
        return Route("models", model) if model != path and model else None

    def claims(self, target: Target) -> bool:
        own = target.path.removeprefix("/v1").startswith(_OWN_PATHS)
        return own or _VERSION in target.headers or target.path.startswith(_CLAUDE_CODE_PATHS)

    def parse(self, target: Target, body: bytes, memory: Memory | None = None) -> ChatRequest:
        return parse_request(body, memory or Memory())

    def reply(self, request: ChatRequest, reply: Reply) -> bytes:
        return whole_reply(reply)

    def events(self, request: ChatRequest, call_id: str, created: int) -> MessageEvents:
        return MessageEvents(request, call_id)

    def fault(self, fault: Fault) -> tuple[int, bytes]:
        return fault_reply(fault)

    def token_count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})

    def models(self, route: Route, cards: Sequence[ModelCard]) -> bytes:
        data = [_model(card) for card in cards]
        if route.model:
            return msgspec.json.encode(data[0])
        ends = {"first_id": cards[0].id if cards else None, "last_id": cards[-1].id if cards else None}
        return msgspec.json.encode({"data": data, "has_more": False, **ends})


def _model(card: ModelCard) -> dict[str, object]:
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
        "max_tokens": card.max_model_len,
    }
