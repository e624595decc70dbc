"""Replies of model families whose tool calls others know how to read.

What is reasoning and what is text is decided here, while the ids come, by the family's tags; only the calls are left to the
family's own parser, which sees each block of them once, at the reply's end. Layout is what it is for the Hermes format:
spaces, tabs and line ends that touch a call, a reasoning block or the end. A block that holds no call goes out as text (T16).

Replies are untrusted: reading them never raises, and nothing is lost.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec import Struct

from polar.chat import Delta
from polar.tokens.channels import Channel, Pieces, deltas, is_layout
from polar.tokens.rendering import Attempt, ParsedReply
from polar.tokens.tokenizer import Tokenizer


class Tags(Struct, frozen=True):
    """How a family marks the parts of a reply.

    Attributes:
        call: opens a block of calls, which `call_end` closes.
        bare: nothing closes it: a reply that begins with `call` may be one call as a whole.
    """

    call: str
    call_end: str = ""
    think: str = "<think>"
    think_end: str = "</think>"
    bare: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.call, self.think, self.think_end)))

    def split(self, source: str) -> list[str]:
        """Text and blocks of calls in turn, beginning and ending with text."""
        if self.bare:
            return ["", source, ""]
        return re.split(f"({re.escape(self.call)}.*?(?:{re.escape(self.call_end)}|\\Z))", source, flags=re.DOTALL)

    def inner(self, block: str) -> str | None:
        """What stands between a block's tags; None where it was not closed."""
        if self.bare:
            return block
        return block[len(self.call) : -len(self.call_end)] if block.endswith(self.call_end) else None


ReadCalls = Callable[[str], Sequence[Attempt]]  # takes a block as the model wrote it, tags and all


class TaggedParser:
    """Reads one reply; see `ReplyParser`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Collection[int],
        tags: Tags,
        read_calls: ReadCalls,
        *,
        thinking: bool,
    ) -> None:
        """Take the parser of calls, and whether the prompt has opened the reasoning."""
        self._pieces = Pieces(tokenizer, stop_ids, tags.all)
        self._tags = tags
        self._read_calls = read_calls
        self._text = Channel()
        self._reasoning = Channel()
        self._thinking = False
        self._begun = False
        self._block: list[str] = []  # from the first call's tag on
        self._calls: list[tuple[str, str]] = []
        self._findings: dict[str, None] = {}
        if thinking:
            self._think()

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """Take the next sampled ids; give the text and reasoning that is now certain. Amortised O(1) per id."""
        self._read(self._pieces.push(ids))
        return deltas(self._reasoning, self._text)

    def finish(self) -> tuple[list[Delta], ParsedReply]:
        """The deltas still held back, and the whole reply."""
        self._read(self._pieces.finish())
        if self._block:
            self._close("".join(self._block))
        fresh = deltas(self._reasoning, self._text)
        return fresh, ParsedReply(self._text.all, self._reasoning.all, tuple(self._calls), tuple(self._findings))

    def _read(self, pieces: Iterable[str]) -> None:
        for piece in pieces:
            if self._thinking:
                self._read_reasoning(piece)
            elif self._block:
                self._block.append(piece)
            else:
                self._read_text(piece)
            self._begun = self._begun or not is_layout(piece)

    def _read_text(self, piece: str) -> None:
        if piece == self._tags.call and not (self._tags.bare and self._begun):
            self._block.append(piece)
        elif piece == self._tags.think and not self._begun:
            self._think()
        else:
            self._text.write(piece)

    def _read_reasoning(self, piece: str) -> None:
        """A call ends reasoning that nothing else ends; which it is shows at the end, so it is held back until then."""
        if piece == self._tags.think_end:
            for held in self._block:
                self._reasoning.write(held)
            self._block.clear()
            self._thinking = False
            self._reasoning.block()
        elif self._block or piece == self._tags.call:
            self._block.append(piece)
        elif piece != self._tags.think or self._begun:  # the prompt has opened it, and the model does so again
            self._reasoning.write(piece)

    def _think(self) -> None:
        self._thinking = True
        self._text.block()
        self._reasoning.block()

    def _close(self, source: str) -> None:
        parts = self._tags.split(source)
        blocks = [self._read_calls(block) for block in parts[1::2]]
        if not any(map(_holds_call, blocks)):
            if not self._tags.bare:
                self._findings["tool_parse_error"] = None
            self._text.write(source)
            return
        self._text.block()
        for words, block, attempts in zip(parts[0::2], parts[1::2], blocks, strict=False):
            self._write(words)
            self._take(block, attempts)
        self._write(parts[-1])

    def _take(self, block: str, attempts: Sequence[Attempt]) -> None:
        """The calls of a block and the words of what is none, or all its words."""
        for attempt in attempts if _holds_call(attempts) else [Attempt("", None, block)]:
            if attempt.arguments is not None:
                self._calls.append((attempt.name, attempt.arguments))
            else:
                self._findings["tool_parse_error"] = None
                self._write(attempt.raw)

    def _write(self, words: str) -> None:
        self._text.write(words)
        self._text.block()


def _holds_call(attempts: Iterable[Attempt]) -> bool:
    return any(attempt.arguments is not None for attempt in attempts)
