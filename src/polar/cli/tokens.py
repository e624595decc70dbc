"""Token ids as people read them: trained tokens apart from their context, each with its log-probability on demand."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.text import Text

from polar.cli.console import plain
from polar.specs import Trace

Decode = Callable[[Sequence[int]], str]

CONTEXT, TRAINED = "dim", "bold green"
OPEN, CLOSE = "⟦", "⟧"
# Nats; a value belongs to the first limit that it reaches.
SCALE = ((-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"))
UNLIKELY = "red"
LONGEST_CHARACTER = 4  # tokens that one character may be cut into
BROKEN = "\ufffd"


@dataclass(frozen=True)
class Writer:
    """How tokens are written.

    Attributes:
        decode: ids to text; None writes the ids themselves.
        logprobs: write each trained token with its value.
        marks: set trained tokens off by ⟦ ⟧, for a page without colours.
    """

    decode: Decode | None
    logprobs: bool = False
    marks: bool = False

    def trace(self, trace: Trace) -> Text:
        """Prompt and response of a trace."""
        text = Text().append_text(self._text(trace.prompt_ids.tolist(), CONTEXT))
        ids, mask, values = trace.response_ids.tolist(), trace.loss_mask.tolist(), trace.response_logprobs.tolist()
        for trained, run in groupby(zip(ids, mask, values, strict=True), key=lambda token: token[1]):
            tokens = list(run)
            if trained:
                text.append_text(self._trained([id for id, _, _ in tokens], [value for _, _, value in tokens]))
            else:
                text.append_text(self._text([id for id, _, _ in tokens], CONTEXT))
        return text

    def _trained(self, ids: list[int], values: list[float]) -> Text:
        text = self._valued(ids, values) if self.logprobs else self._text(ids, TRAINED)
        return Text.assemble(OPEN, text, CLOSE) if self.marks else text

    def _valued(self, ids: list[int], values: list[float]) -> Text:
        text = Text()
        for start, end in self._characters(ids):
            group = values[start:end]
            style = next((style for limit, style in SCALE if min(group) >= limit), UNLIKELY)
            text.append_text(self._text(ids[start:end], f"bold {style}", newline="↵\n"))
            text.append(f"({' '.join(f'{value:.2f}' for value in group)})", "dim")
        return text

    def _text(self, ids: list[int], style: str, newline: str = "\n") -> Text:
        if self.decode is None:
            return plain("".join(f"{id} " for id in ids), style)
        return plain(self.decode(ids).replace("\n", newline), style)

    def _characters(self, ids: list[int]) -> Iterator[tuple[int, int]]:
        """The tokens one by one; those that only together spell a character stay together."""
        start = 0
        while start < len(ids):
            end = start + 1
            while self._breaks(ids[start:end]) and end < min(len(ids), start + LONGEST_CHARACTER):
                end += 1
            if self._breaks(ids[start:end]):
                end = start + 1
            yield start, end
            start = end

    def _breaks(self, ids: list[int]) -> bool:
        return self.decode is not None and self.decode(ids).endswith(BROKEN)
