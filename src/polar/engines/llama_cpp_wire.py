"""What goes over the wire to and from llama.cpp's `/completion`, and which log-probability belongs to which token."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from polar.errors import EngineError

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
ANY_SEED = 0xFFFFFFFF  # "a new one each time"
EVERY = 1 << 24  # more than any vocabulary has
_SPECULATIVE = "generation_settings/speculative.types"


class CompletionRequest(Struct):
    """A prompt of ids. Every sampling field is sent, so that no default of the server's command line sneaks in (L04).

    `samplers` names all that touch the logits, in vLLM's order; `top_k` 0 is llama.cpp's "off" too.
    """

    prompt: Raw
    n_predict: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    n_probs: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()
    json_schema: Raw | UnsetType = UNSET
    grammar: str | UnsetType = UNSET
    cache_prompt: bool = True
    samplers: tuple[str, ...] = ("temperature", "top_k", "top_p")
    dynatemp_range: float = 0.0
    mirostat: int = 0
    seed: int = ANY_SEED
    ignore_eos: bool = False
    backend_sampling: bool = False
    post_sampling_probs: bool = False
    stream: bool = False
    return_tokens: bool = True
    response_fields: tuple[str, ...] = (
        "tokens",
        "stop_type",
        "tokens_predicted",
        "tokens_evaluated",
        "tokens_cached",
        "completion_probabilities",
        _SPECULATIVE,
    )


class Shown(Struct, gc=False):
    """A token whose log-probability the server tells.

    Attributes:
        top_logprobs: the `n_probs` likeliest tokens at its place.
    """

    id: TokenId
    logprob: float | None
    top_logprobs: list["Shown"] = []

    @property
    def value(self) -> float:
        """NaN for null, which detector L02 names."""
        return math.nan if self.logprob is None else self.logprob


class Completion(Struct):
    """What was sampled.

    Attributes:
        tokens: every sampled id, the one that ended the turn too.
        completion_probabilities: of those tokens that do not end inside a character, in order.
        tokens_evaluated, tokens_predicted: ids of the prompt, and of the reply.
        tokens_cached: ids in the context at the end; the last sampled one has not entered it.
    """

    tokens: list[TokenId]
    stop_type: Literal["none", "eos", "limit", "word"]
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    completion_probabilities: list[Shown] = []
    speculative: str = field(default="none", name=_SPECULATIVE)

    def check(self) -> None:
        """Whether the reply is what was asked for.

        Raises:
            EngineError: ids are missing (T08), the server dropped a part of the context (T10), or it guesses ahead, in which
                case nothing is known of what its log-probabilities mean (L02).
        """
        if len(self.tokens) != self.tokens_predicted:
            raise EngineError(f"T08: the engine sampled {self.tokens_predicted} tokens and sent {len(self.tokens)} ids")
        entered = self.tokens_evaluated + self.tokens_predicted - 1
        if self.tokens_cached < entered:
            raise EngineError(
                f"T10: the engine dropped {entered - self.tokens_cached} tokens of the context while it sampled: "
                "start it without --context-shift"
            )
        if self.speculative != "none":
            raise EngineError(f"L02: the engine decodes speculatively ({self.speculative}): start it without a draft")


class _Generation(Struct):
    n_ctx: int


class Props(Struct):
    default_generation_settings: _Generation
    model_alias: str
    total_slots: int


class Tokenized(Struct):
    tokens: list[TokenId]


def matched(ids: Sequence[int], shown: Sequence[Shown]) -> list[float | None]:
    """The log-probability of each id; None where none is shown, or where one may be of another place with the same id.

    Raises:
        EngineError: what is shown is not of these ids (T08).
    """
    named = [entry.id for entry in shown]
    earliest = _places(ids, named)
    latest = [len(ids) - 1 - place for place in reversed(_places(ids[::-1], named[::-1]))]
    logprobs: list[float | None] = [None] * len(ids)
    for entry, first, last in zip(shown, earliest, latest, strict=True):
        if first == last:
            logprobs[first] = entry.value
    return logprobs


def _places(ids: Sequence[int], named: Sequence[int]) -> list[int]:
    """Where `named` stand in `ids`, each as early as can be."""
    places: list[int] = []
    for token in named:
        try:
            places.append(ids.index(token, places[-1] + 1 if places else 0))
        except ValueError:
            raise EngineError(f"T08: the engine sent ids {list(ids)} with log-probabilities for {list(named)}") from None
    return places
