"""Messages to ids and ids to messages.

A renderer belongs to a model family. It renders a history once, at a session's start or a fork; from then on it only
renders what is new (`bridge`), so that the ids which were sampled are never decoded and encoded again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from msgspec import Struct

from polar.chat import Delta, Message, Tool, ToolCall
from polar.specs import Int32Array


class ParsedReply(Struct, frozen=True):
    """What a finished generation says.

    Attributes:
        tool_calls: (name, arguments as written) in order; ids are minted by the gateway.
        findings: names of what was odd (`tool_parse_error`).
    """

    text: str
    reasoning: str
    tool_calls: tuple[tuple[str, str], ...]
    findings: tuple[str, ...] = ()


class Attempt(Struct, frozen=True):
    """One call in a reply as a reader of its format took it: `arguments` are a JSON object, or None where `raw` is no call."""

    name: str
    arguments: str | None
    raw: str


class ReplyParser(Protocol):
    """Reads one generation token by token. The deltas, joined, equal `finish()`'s text and reasoning."""

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """Take the next sampled ids; give the text and reasoning that is now certain."""
        ...

    def finish(self) -> tuple[list[Delta], ParsedReply]:
        """The deltas still held back, and the whole reply. Tool calls appear only here."""
        ...


@dataclass(frozen=True)
class LastTurn:
    """The reply that a prompt goes on from.

    Attributes:
        ids: as they were sampled.
        stopped: they end with a stop id (otherwise the turn was cut, and is closed by the bridge).
        calls: what the harness was told of it; some templates repeat a call's name or place next to its result.
    """

    ids: Int32Array
    stopped: bool
    calls: tuple[ToolCall, ...] = ()


class Renderer(Protocol):
    """Rendering for one model family with one loaded tokenizer. Text from messages never becomes a control token (T12).

    Attributes:
        shows_tools: a prompt says which tools there are; else a request with tools is refused.
    """

    name: str
    stop_ids: tuple[int, ...]
    shows_tools: bool

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        """A whole history, ending where the assistant's next words begin; int32[n]."""
        ...

    def bridge(self, last: LastTurn, messages: Sequence[Message]) -> Int32Array:
        """What follows sampled ids: the rest of the assistant's turn, then `messages`, then the next turn's opening; int32[n].

        Args:
            messages: what came after the reply; never an assistant message.

        Raises:
            BridgeRefused: there is no going on from these ids; the history is to be rendered whole.
        """
        ...

    def parser(self, tools: Sequence[Tool] = ()) -> ReplyParser:
        """A fresh parser for one generation that starts where a rendering ended.

        Args:
            tools: those of the request; where a format writes arguments without types, these come from the schemas.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` with control tokens spelled out, for people to read."""
        ...


@runtime_checkable
class Forgets(Protocol):
    """A renderer of a template that leaves earlier reasoning out, where `render` keeps it."""

    def render_as_sent(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        """As `render`, but by the template's own rules for earlier reasoning."""
        ...


def render_as_sent(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
    """A whole history with the reasoning that its sender left in it and the model's template shows; int32[n]."""
    return renderer.render_as_sent(messages, tools) if isinstance(renderer, Forgets) else renderer.render(messages, tools)
