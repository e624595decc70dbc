"""The seam between a wire API and the pivot. A dialect parses and renders bytes; it does no I/O and knows no engine."""

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct

from polar.chat import ChatRequest, Delta, Reply
from polar.dialects.bodies import Memory

JSON = "application/json"
EVENT_STREAM = "text/event-stream"

RouteKind = Literal["generate", "count_tokens", "models"]
FaultKind = Literal[
    "invalid",  # 400: malformed, or refused by name
    "context_length",  # 400 or what the dialect says of a prompt that is too long, so that harnesses compact
    "unauthorized",  # 401
    "not_found",  # 404
    "frozen",  # 409
    "unavailable",  # 503: the engine or the store; a retry may succeed
    "internal",  # 500: tokens that cannot be trusted, or a bug of ours; harnesses ask again
]


class Target(Struct, frozen=True):
    """What a request is for: its path and query below the session's base URL, and its headers by lower-case name."""

    method: str
    path: str
    query: str = ""
    headers: dict[str, str] = {}


class Route(Struct, frozen=True):
    """A route that a dialect serves. `model` is the one named in the path; for `models`, "" asks for the list."""

    kind: RouteKind
    model: str = ""


class ModelCard(Struct, frozen=True):
    """A model as the models routes show it. `max_model_len` counts prompt and reply together, `created` unix seconds."""

    id: str
    max_model_len: int
    created: int


class Fault(Struct, frozen=True):
    """Why a request gets no reply. The token counts are those of `context_length`."""

    kind: FaultKind
    code: str
    message: str
    prompt_tokens: int = 0
    max_model_len: int = 0


class EventWriter(Protocol):
    """Writes one streamed reply as the dialect's own events. Text comes first, in `delta`; what can be acted on, in `finish`."""

    content_type: str

    def start(self) -> bytes:
        """What opens the stream; goes out with the headers."""
        ...

    def delta(self, delta: Delta) -> bytes: ...

    def keep_alive(self) -> bytes:
        """An event that says nothing, so that no idle connection is taken for dead. Only sent between `start` and `finish`."""
        ...

    def finish(self, reply: Reply) -> bytes:
        """Tool calls, finish reason, usage, end of stream. Text and reasoning have been sent before, in `delta`."""
        ...

    def error(self, fault: Fault) -> bytes:
        """The error event that ends a stream which has begun; never a clean end."""
        ...


class Dialect(Protocol):
    """One wire API."""

    name: str

    def route(self, target: Target) -> Route | None:
        """What this dialect serves at `target`; None where that is not its own."""
        ...

    def claims(self, target: Target) -> bool:
        """Whether a request for a route that nobody serves seems to speak this dialect: it is answered in its shape."""
        ...

    def parse(self, target: Target, body: bytes, memory: Memory | None = None) -> ChatRequest:
        """The body of a `generate` or `count_tokens` request as pivot; with a `memory`, what is known is not read again.

        Raises:
            InvalidRequest: malformed, or it asks for what is refused by name.
        """
        ...

    def reply(self, request: ChatRequest, reply: Reply) -> bytes:
        """Body of a reply that is not streamed."""
        ...

    def events(self, request: ChatRequest, call_id: str, created: int) -> EventWriter: ...

    def fault(self, fault: Fault) -> tuple[int, bytes]:
        """HTTP status and body of an error reply."""
        ...

    def token_count(self, tokens: int) -> bytes:
        """Body of the answer to `count_tokens`; a dialect without that route never gets here."""
        ...

    def models(self, route: Route, cards: Sequence[ModelCard]) -> bytes:
        """Body of the answer to `models`: all cards as a list, or the one card that `route.model` named."""
        ...
