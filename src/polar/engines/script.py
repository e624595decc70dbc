"""What a scripted policy is asked and answers, and how it samples: pure.

It samples as no tokenizer encodes: each text is cut at random into pieces of the vocabulary.
"""

import asyncio
import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from tokenizers import Tokenizer

from polar.errors import UsageError

Fault = Literal[
    "missing_logprob",  # the first chunk has one log-probability too few (T08)
    "nan_logprob",  # null, which is how NaN looks in JSON (L02)
    "sentinel_logprob",  # -9999, which is how vLLM shows NaN and -inf (L02)
    "usage_off_by_one",  # one completion token more than there are ids (T08)
    "version_gap",  # no version for the first token (W01)
    "die",  # the connection breaks after half of the tokens
    "http_500",
]

SPLIT_PROBABILITY = 0.3


class ScriptedCall(Struct, frozen=True):
    """What a script answers.

    Attributes:
        turn: assistant turns that the prompt closes; 0 in a first call.
        prompt_text: the prompt decoded, control tokens included.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    prompt_text: str
    turn: int


@dataclass(frozen=True)
class Scripted:
    """An answer.

    Attributes:
        delay_per_token: seconds.
        hold_before_end: seconds, or an event, to wait for between the last token and the finish chunk.
        finish: `stop` appends the end-of-turn id to the text; `length` does not.
        fault: what the engine does wrong with it.
    """

    text: str
    delay_per_token: float = 0.0
    tokens_per_chunk: int = 1
    hold_before_end: float | asyncio.Event = 0.0
    finish: Literal["stop", "length"] = "stop"
    fault: Fault | None = None


class Policy:
    """What the scripted policy does with tokens; no I/O."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        if not {"<|im_start|>", "<|im_end|>"} <= self._vocabulary.keys():
            raise UsageError("the scripted engine needs a tokenizer with <|im_start|> and <|im_end|>")
        self._end = self._vocabulary["<|im_end|>"]
        self._assistant = [self._vocabulary["<|im_start|>"], *self._encode("assistant")]

    def read(self, request_id: str, prompt_ids: Sequence[int]) -> ScriptedCall:
        """What a script is asked."""
        ids = tuple(prompt_ids)
        return ScriptedCall(request_id, ids, self._tokenizer.decode(ids, skip_special_tokens=False), self._turn(ids))

    def plan(self, script: Scripted, request_id: str, limit: int) -> tuple[list[int], str]:
        """Ids to sample, at most `limit`, and the finish reason."""
        ids = self._segment(script.text, random.Random(request_id))
        if script.finish == "stop":
            ids.append(self._end)
        return ids[:limit], script.finish if len(ids) <= limit else "length"

    def logprobs(self, prefix: Sequence[int], ids: Iterable[int]) -> list[float]:
        """Made-up values that depend on all that is before, so that `score` finds the same; in (-4, 0), exact in float32."""
        state = zlib.crc32(np.asarray(prefix, "<i4").tobytes())
        values = []
        for token in ids:
            state = zlib.crc32(token.to_bytes(4, "little"), state)
            values.append(-(state % 4095 + 1) / 1024)
        return values

    def score(self, ids: list[int]) -> dict[str, Any]:
        """vLLM's reply to a request for prompt log-probabilities, as far as Polar reads it."""
        scored = zip(ids[1:], self.logprobs(ids[:1], ids[1:]), strict=True)
        entries = [{str(token): {"logprob": value, "rank": 1, "decoded_token": None}} for token, value in scored]
        return {"prompt_logprobs": [None, *entries], "choices": []}

    def _turn(self, ids: tuple[int, ...]) -> int:
        width = len(self._assistant)
        starts = np.flatnonzero(np.asarray(ids) == self._assistant[0])
        opened = [start for start in starts if list(ids[start : start + width]) == self._assistant]
        return sum(self._end in ids[start:] for start in opened[-1:]) + len(opened[:-1])

    def _segment(self, text: str, rng: random.Random) -> list[int]:
        """Pieces of the vocabulary that spell `text`, never the ones that the tokenizer would choose, if there is a choice."""
        canonical = self._encode(text)
        choices = [place for place, token in enumerate(canonical) if self._cuts(token)]
        forced = rng.choice(choices) if choices else -1
        pieces: list[int] = []
        for place, token in enumerate(canonical):
            pieces += self._cut(token, rng, place == forced)
        return pieces

    def _cut(self, token: int, rng: random.Random, forced: bool = False) -> list[int]:
        if not forced and rng.random() >= SPLIT_PROBABILITY:
            return [token]
        if not (cuts := self._cuts(token)):
            return [token]
        left, right = rng.choice(cuts)
        return self._cut(left, rng) + self._cut(right, rng)

    def _cuts(self, token: int) -> list[tuple[int, int]]:
        if token in self._added:
            return []
        spelling, known = self._tokenizer.id_to_token(token) or "", self._vocabulary
        halves = [(spelling[:at], spelling[at:]) for at in range(1, len(spelling))]
        return [(known[left], known[right]) for left, right in halves if left in known and right in known]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
