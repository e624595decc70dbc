"""Gemini: `POST …/models/{model}:generateContent`, `:streamGenerateContent` and `:countTokens`, and the models routes.

The paths are those of the Gemini API in all its versions, and of Vertex AI.
"""

import re
from collections.abc import Sequence

from polar.chat import ChatRequest, Reply
from polar.dialects.ascii import encode
from polar.dialects.bodies import Memory
from polar.dialects.gemini_reply import ReplyEvents, error_body, status, whole_reply
from polar.dialects.gemini_request import read_request
from polar.dialects.protocol import Fault, ModelCard, Route, Target
from polar.errors import InvalidRequest

_VERB = re.compile(
    r"/v1(?:alpha|beta1?)?(?:/projects/[^/]+/locations/[^/]+)?(?:/publishers/[^/]+)?/models/(?P<model>.+)"
    r":(?P<verb>generateContent|streamGenerateContent|countTokens)"
)
_MODELS = re.compile(r"/v1(?:alpha|beta1?)?(?:/publishers/[^/]+)?/models(?:/(?P<model>.+))?")
_SSE = re.compile(r"(?:^|&)(?:\$|%24)?alt=sse(?:&|$)")


class Gemini:
    """The dialect; stateless."""

    name = "gemini"

    def route(self, target: Target) -> Route | None:
        if target.method == "POST":
            found = _VERB.fullmatch(target.path)
            if found is None:
                return None
            return Route("count_tokens" if found["verb"] == "countTokens" else "generate", found["model"])
        found = _MODELS.fullmatch(target.path)
        if found is None or target.method not in ("GET", "HEAD") or not self.claims(target):
            return None
        return Route("models", found["model"] or "")

    def claims(self, target: Target) -> bool:
        return target.path.startswith(("/v1beta", "/v1alpha")) or "x-goog-api-key" in target.headers

    def parse(self, target: Target, body: bytes, memory: Memory | None = None) -> ChatRequest:
        found = _VERB.fullmatch(target.path)
        if found is None:
            raise InvalidRequest(f"expected a path like /v1beta/models/NAME:generateContent, got {target.path}")
        return read_request(
            found["model"], found["verb"], sse=bool(_SSE.search(target.query)), body=body, memory=memory or Memory()
        )

    def reply(self, request: ChatRequest, reply: Reply) -> bytes:
        return whole_reply(request, reply)

    def events(self, request: ChatRequest, call_id: str, created: int) -> ReplyEvents:
        return ReplyEvents(request, call_id)

    def fault(self, fault: Fault) -> tuple[int, bytes]:
        return status(fault), encode(error_body(fault))

    def token_count(self, tokens: int) -> bytes:
        return encode({"totalTokens": tokens})

    def models(self, route: Route, cards: Sequence[ModelCard]) -> bytes:
        data = [_card(card) for card in cards]
        return encode(data[0] if route.model else {"models": data})


def _card(card: ModelCard) -> dict[str, object]:
    return {
        "name": f"models/{card.id}",
        "version": "polar",
        "displayName": card.id,
        "inputTokenLimit": card.max_model_len,
        "outputTokenLimit": card.max_model_len,
        "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
    }
