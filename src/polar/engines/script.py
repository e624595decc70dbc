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

from polar.engines.self_test import PREFIX
from polar.errors import UsageError

Fault = Literal[
    "missing_logprob",  # the first chunk has one log-probability too few (T08)
    "nan_logprob",  # null, which is how NaN looks in JSON (L02)
    "sentinel_logprob",  # -9999, which is how vLLM shows NaN and -inf (L02)
    "usage_off_by_one",  # one completion token more than there are ids (T08)
    "version_gap",  # no version for the first token (W01)
    "missing_extra",  # no sampling mask for the first token (T08)
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
        canonical: sampled as the tokenizer encodes, which a trained policy does most of the time.
        extras: the token route tells `routed_experts` and `sampling_mask` too, as a vLLM does that is started for it.
    """

    text: str
    delay_per_token: float = 0.0
    tokens_per_chunk: int = 1
    hold_before_end: float | asyncio.Event = 0.0
    finish: Literal["stop", "length"] = "stop"
    fault: Fault | None = None
    canonical: bool = False
    extras: bool = False


def prove(call: ScriptedCall) -> Scripted:
    """Answers the self-test: shortly, and at length where it wants to abort."""
    return Scripted("and so on " * 60, delay_per_token=0.001) if f"{PREFIX}abort" in call.request_id else Scripted("ok")


class Policy:
    """What the scripted policy does with tokens; no I/O."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        if not {"<|im_start|>", "<|im_end|>"} <= self._vocabulary.keys():
            raise UsageError("the scripted engine needs a tokenizer with <|im_start|> and <|im_end|>")
        self._end = self._vocabulary["<|im_end|>"]
        self._assistant = [self._vocabulary["<|im_start|>"], *self.encode("assistant")]

    def read(self, request_id: str, prompt_ids: Sequence[int]) -> ScriptedCall:
        """What a script is asked."""
        ids = tuple(prompt_ids)
        return ScriptedCall(request_id, ids, self._tokenizer.decode(ids, skip_special_tokens=False), self._turn(ids))

    def encode(self, text: str, special: bool = False) -> list[int]:
        """What the tokenizer makes of text in which control tokens are spelled out; `special` adds those that it adds itself."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def text(self, ids: Sequence[int]) -> str:
        """What `ids` say, without control tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def spelling(self, token: int) -> str:
        """One token as text, a control token too."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def plan(self, script: Scripted, request_id: str, limit: int, stop_ids: Sequence[int] = ()) -> tuple[list[int], str]:
        """Ids to sample, at most `limit` and none after one of `stop_ids`, and the finish reason."""
        ids = self.encode(script.text) if script.canonical else self._segment(script.text, random.Random(request_id))
        if script.finish == "stop":
            ids.append(self._end)
        stopped = next((place + 1 for place, token in enumerate(ids[:limit]) if token in stop_ids), 0)
        if stopped:
            return ids[:stopped], "stop"
        return ids[:limit], script.finish if len(ids) <= limit else "length"

    def logprobs(self, prefix: Sequence[int], ids: Iterable[int]) -> list[float]:
        """Made-up values that depend on all that is before, so that `score` finds the same; in (-4, 0), exact in float32."""
        state = zlib.crc32(np.asarray(prefix, "<i4").tobytes())
        values = []
        for token in ids:
            state = zlib.crc32(token.to_bytes(4, "little"), state)
            values.append(-(state % 4095 + 1) / 1024)
        return values

    def score(self, ids: list[int]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`."""
        scored = zip(ids[1:], self.logprobs(ids[:1], ids[1:]), strict=True)
        entries = [{str(token): {"logprob": value, "rank": 1, "decoded_token": None}} for token, value in scored]
        return [None, *entries]

    def _turn(self, ids: tuple[int, ...]) -> int:
        width = len(self._assistant)
        starts = np.flatnonzero(np.asarray(ids) == self._assistant[0])
        opened = [start for start in starts if list(ids[start : start + width]) == self._assistant]
        return sum(self._end in ids[start:] for start in opened[-1:]) + len(opened[:-1])

    def _segment(self, text: str, rng: random.Random) -> list[int]:
        """Pieces of the vocabulary that spell `text`, never the ones that the tokenizer would choose, if there is a choice."""
        canonical = self.encode(text)
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
