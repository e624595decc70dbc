"""The seam between a wire API and the pivot. A dialect parses and renders bytes; it does no I/O and knows no engine."""

from typing import Protocol

from polar.chat import ChatRequest, Delta, Reply

JSON = "application/json"
EVENT_STREAM = "text/event-stream"


class EventWriter(Protocol):
    """Writes one streamed reply as the dialect's own events. Text comes first, in `delta`; what can be acted on, in `finish`."""

    def start(self) -> bytes:
        """What opens the stream; goes out with the headers."""
        ...

    def delta(self, delta: Delta) -> bytes: ...

    def keep_alive(self) -> bytes:
        """An event that says nothing, so that no idle connection is taken for dead."""
        ...

    def finish(self, reply: Reply) -> bytes:
        """Tool calls, finish reason, usage, end of stream. The text has been sent before."""
        ...

    def error(self, status: int, code: str, message: str) -> bytes:
        """The error event that ends a stream which has begun; never a clean end."""
        ...


class Dialect(Protocol):
    """One wire API."""

    name: str

    def serves(self, path: str) -> bool:
        """Whether `path` (below the session's base URL, without query) is this dialect's generate route."""
        ...

    def parse(self, path: str, body: bytes) -> ChatRequest:
        """The request as pivot.

        Raises:
            InvalidRequest: malformed, or it asks for what is refused by name.
        """
        ...

    def reply(self, reply: Reply) -> bytes:
        """Body of a reply that is not streamed."""
        ...

    def events(self, request: ChatRequest, call_id: str, created: int) -> EventWriter: ...

    def error(self, status: int, code: str, message: str) -> bytes:
        """Body of an error reply."""
        ...
