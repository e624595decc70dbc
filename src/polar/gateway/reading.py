"""What a choice says, read as it comes: from its ids by the renderer's parser, or from what a chatting engine reads itself."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import structs

from polar.chat import Delta, ReasoningDelta, TextDelta, Tool
from polar.gateway.stopping import Decode, anchor, first, spelling
from polar.tokens.rendering import ParsedReply, Renderer


class Reader(Protocol):
    """Reads one generation. The deltas, joined, equal the text and reasoning of what it says in the end."""

    def push(self, ids: Sequence[int], deltas: Sequence[Delta]) -> list[Delta]:
        """Take what arrived together; give the text and reasoning that is now certain."""
        ...

    def finish(self, parsed: ParsedReply | None) -> tuple[list[Delta], ParsedReply]:
        """The deltas still held back, and the whole reply; `parsed` as the engine read it, if it did."""
        ...

    def cut(self, ids: Sequence[int], shown: str, stop: str) -> tuple[ParsedReply, int, bool]:
        """Where a stop text ended the reply.

        Returns:
            What it says up to there, how many of `ids` say that and the stop text, and whether that number is exact.
        """
        ...


class IdReader:
    """Token-in: ids say it all."""

    def __init__(self, renderer: Renderer, tools: Sequence[Tool]) -> None:
        self._renderer = renderer
        self._tools = tools
        self._parser = renderer.parser(tools)

    def push(self, ids: Sequence[int], deltas: Sequence[Delta]) -> list[Delta]:
        return self._parser.push(ids)

    def finish(self, parsed: ParsedReply | None) -> tuple[list[Delta], ParsedReply]:
        return self._parser.finish()

    def cut(self, ids: Sequence[int], shown: str, stop: str) -> tuple[ParsedReply, int, bool]:
        size = first(len(ids), lambda size: self._parse(ids[:size]).text.startswith(shown + stop))
        # A parser gives whitespace out when words follow: those are not kept.
        text, last = self._renderer.decode(ids[:size]), anchor(shown, stop)
        if (at := text.rfind(last)) >= 0:
            size = spelling(self._renderer.decode, ids[:size], text[: at + len(last)])
        return structs.replace(self._parse(ids[:size]), text=shown), size, True

    def _parse(self, ids: Sequence[int]) -> ParsedReply:
        """Some ids, read on their own."""
        parser = self._renderer.parser(self._tools)
        parser.push(ids)
        return parser.finish()[1]


class ChatReader:
    """Chat mode: the engine reads. Its ids can be matched with its text only where there is a decoder."""

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._read = 0
        self._text: list[str] = []
        self._reasoning: list[str] = []

    def push(self, ids: Sequence[int], deltas: Sequence[Delta]) -> list[Delta]:
        self._read += len(ids)
        self._text += [delta.text for delta in deltas if isinstance(delta, TextDelta)]
        self._reasoning += [delta.text for delta in deltas if isinstance(delta, ReasoningDelta)]
        return list(deltas)

    def finish(self, parsed: ParsedReply | None) -> tuple[list[Delta], ParsedReply]:
        return [], parsed or ParsedReply("".join(self._text), "".join(self._reasoning), ())

    def cut(self, ids: Sequence[int], shown: str, stop: str) -> tuple[ParsedReply, int, bool]:
        reasoning, read = "".join(self._reasoning), ids[: self._read]
        parsed = ParsedReply(shown, reasoning, ())
        if self._decode is None:
            return parsed, len(read), False
        text, last = self._decode(read), anchor(shown, stop)
        at = text.find(last, max(text.find(reasoning), 0) + len(reasoning))
        if at < 0:
            return parsed, len(read), False
        return parsed, spelling(self._decode, read, text[: at + len(last)]), True
