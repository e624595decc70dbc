"""Messages to ids and ids to messages.

A renderer belongs to a model family. It renders a history once, at a session's start or a fork; from then on it only
renders what is new (`bridge`), so that the ids which were sampled are never decoded and encoded again.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from polar.chat import Delta, Message, Tool
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


class ReplyParser(Protocol):
    """Reads one generation token by token. The deltas, joined, equal `finish()`'s text and reasoning."""

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """Take the next sampled ids; give the text and reasoning that is now certain."""
        ...

    def finish(self) -> tuple[list[Delta], ParsedReply]:
        """The deltas still held back, and the whole reply. Tool calls appear only here."""
        ...


class Renderer(Protocol):
    """Rendering for one model family with one loaded tokenizer. Text from messages never becomes a control token (T12)."""

    name: str
    stop_ids: tuple[int, ...]

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        """A whole history, ending where the assistant's next words begin; int32[n]."""
        ...

    def bridge(self, stopped: bool, messages: Sequence[Message]) -> Int32Array:
        """What follows sampled ids: the rest of the assistant's turn, then `messages`, then the next turn's opening; int32[n].

        Args:
            stopped: the sampled ids end with a stop id (otherwise the turn was cut and is closed here).
            messages: what came after the reply; never an assistant message.
        """
        ...

    def parser(self) -> ReplyParser:
        """A fresh parser for one generation that starts where a rendering ended."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` with control tokens spelled out, for people to read."""
        ...
