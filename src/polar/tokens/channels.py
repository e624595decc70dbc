"""What parsers of replies share: ids become pieces of text, and pieces become text or reasoning."""

import re
from collections.abc import Collection, Iterable, Sequence

from polar.chat import Delta, ReasoningDelta, TextDelta
from polar.tokens.tokenizer import Tokenizer

LAYOUT = " \t\r\n"


class Pieces:
    """Reads ids as text and cuts it at tags: a piece is a whole tag, or text without one.

    The last id, if it is a stop id, is not text; control tokens elsewhere are. What may be the start of a tag is held back.

    Attributes:
        ids: all that came, without the stop id at the end.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Collection[int], tags: Iterable[str]) -> None:
        """Take the tags to cut at; one of more than a letter begins with `<`."""
        self.ids: list[int] = []
        self._decoder = tokenizer.stream_decoder()
        self._stop_ids = frozenset(stop_ids)
        self._stop: tuple[int, ...] = ()  # a stop id that may turn out to be the last
        self._tags = tuple(tags)
        self._tag = re.compile("(" + "|".join(map(re.escape, self._tags)) + ")")
        self._held = ""

    def push(self, ids: Sequence[int]) -> list[str]:
        """Take the next ids; amortised O(1) per id."""
        if not len(ids):
            return []
        if self._stop:
            ids, self._stop = (*self._stop, *ids), ()
        if ids[-1] in self._stop_ids:
            ids, self._stop = ids[:-1], (ids[-1],)
        self.ids.extend(ids)
        return self._cut(self._decoder.push(ids))

    def finish(self) -> list[str]:
        """What was held back."""
        pieces = self._cut(self._decoder.finish())
        if self._held:
            pieces.append(self._held)
        self._held = ""
        return pieces

    def _cut(self, text: str) -> list[str]:
        *pieces, last = self._tag.split(self._held + text)
        start = last.rfind("<")
        is_open = start >= 0 and any(tag.startswith(last[start:]) for tag in self._tags)
        self._held = last[start:] if is_open else ""
        return [piece for piece in (*pieces, last[:start] if is_open else last) if piece]


class Channel:
    """Text or reasoning in the making. Holds whitespace back until it is known not to be layout."""

    def __init__(self) -> None:
        self._taken: list[str] = []
        self._certain: list[str] = []
        self._space: list[str] = []
        self._after_block = False

    @property
    def all(self) -> str:
        return "".join(self._taken)

    def write(self, piece: str) -> None:
        if self._after_block:
            piece = piece.lstrip(LAYOUT)
            self._after_block = not piece
        words = piece.rstrip(LAYOUT)
        if words:
            self._certain += (*self._space, words)
            self._space.clear()
        if len(words) < len(piece):
            self._space.append(piece[len(words) :])

    def block(self) -> None:
        """A call or a reasoning block begins or ends here: whitespace on both sides is layout."""
        self._space.clear()
        self._after_block = True

    def take(self) -> str:
        """What became certain since the last time."""
        if not self._certain:
            return ""
        fresh = "".join(self._certain)
        self._certain.clear()
        self._taken.append(fresh)
        return fresh


def deltas(reasoning: Channel, text: Channel) -> list[Delta]:
    """What became certain. Reasoning only ever comes before text, so one delta of each keeps the order."""
    fresh: list[Delta] = []
    if words := reasoning.take():
        fresh.append(ReasoningDelta(words))
    if words := text.take():
        fresh.append(TextDelta(words))
    return fresh


def is_layout(piece: str) -> bool:
    """Nothing but spaces, tabs and line ends."""
    return not piece.strip(LAYOUT)
