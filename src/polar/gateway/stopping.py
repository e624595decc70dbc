"""Stop texts: watched for in what the harness is shown, and found again among the ids that spell it."""

import bisect
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
_ANCHOR = 64  # characters before a stop text by which it is found among what the ids spell


class TextStopper:
    """Watches a text in pieces for the first of some stop texts; holds back what may be the start of one.

    Attributes:
        active: there are stop texts.
        shown: the text given out so far; never any of a stop text.
        found: the stop text that came; "" for none yet.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.active = bool(stops)
        self.shown = ""
        self.found = ""

    def push(self, text: str) -> str:
        """Take the next piece; give what may be shown."""
        if self.found:
            return ""
        text = self._held + text
        places = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            place, self.found = min(places)
            self._held = ""
            return self._give(text[:place])
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return self._give(text[: len(text) - keep])

    def finish(self) -> str:
        """The text has ended: what was held back is text."""
        held, self._held = self._held, ""
        return self._give(held)

    def _give(self, text: str) -> str:
        self.shown += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def anchor(shown: str, stop: str) -> str:
    """A stop text with as much before it as tells it from others."""
    return shown[-_ANCHOR:] + stop


def spelling(decode: Decode, ids: Sequence[int], said: str) -> int:
    """How many of `ids` it takes to spell `said`, with which their text begins."""
    return first(len(ids), lambda size: decode(ids[:size]).startswith(said))


def first(size: int, holds: Callable[[int], bool]) -> int:
    """The smallest number below `size` for which something holds that also holds for all larger ones; else `size`."""
    return bisect.bisect_left(range(size), True, key=holds)
