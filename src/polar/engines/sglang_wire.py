"""What goes over the wire to and from SGLang's `/generate`, and how an answer is read."""

import math
import random
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from polar.chat import Usage
from polar.engines.protocol import EngineFinish, Generated, ResolvedSampling
from polar.engines.streaming import Events
from polar.engines.vllm_wire import policy_version
from polar.errors import EngineError, EngineRefusal
from polar.specs import VersionSpan

_SEED_BITS = 31
_BAD_REQUEST = 400

Item = TypeVar("Item")


def sampling_seed() -> int:
    """One of its own for each sample."""
    return random.getrandbits(_SEED_BITS)


class SamplingParams(Struct):
    """Every field is sent, so that no default of the model's files or of the server's sneaks in (L04).

    Attributes:
        top_k: -1 for "off".
        json_schema: a schema as text.
        sampling_seed: counts only on a deterministic server, which would otherwise give every sample of a prompt the same one.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    json_schema: str | UnsetType = UNSET
    regex: str | UnsetType = UNSET
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = False
    sampling_seed: int = msgspec.field(default_factory=sampling_seed)


def sampling_params(sampling: ResolvedSampling) -> SamplingParams:
    """What SGLang is told of a sampling."""
    return SamplingParams(
        max_new_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or -1,
        stop_token_ids=sampling.stop_token_ids,
        json_schema=bytes(sampling.json_schema).decode() if sampling.json_schema is not None else UNSET,
        regex=sampling.regex or UNSET,
    )


class GenerateRequest(Struct, omit_defaults=True):
    """Attributes:
    logprob_start_len: place of the prompt from which on its tokens are scored; -1 for none.
    """

    input_ids: Raw
    sampling_params: SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = -1
    rid: str | None = None
    stream: bool = False


class _Finish(Struct, gc=False):
    """Attributes:
    type: `tool_calls`, in chat mode, for a stop after which calls were read; `matched` is then null.
    """

    type: EngineFinish | Literal["tool_calls"]
    matched: int | str | list[int] | None = None
    message: str = ""
    status_code: int | None = None


class _Span(Struct, gc=False):
    version: str
    start: int
    end: int


TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Entry = tuple[float | None, TokenId, str | None]  # log-probability, id, text


class MetaInfo(Struct, gc=False):
    """Attributes:
    completion_tokens: how many were sampled until now, the stop id with them.
    output_token_logprobs: of all of them, or of those that are new.
    weight_versions: with the finish; None from a server that knows only its present one.
    """

    completion_tokens: int
    finish_reason: _Finish | None = None
    prompt_tokens: int | None = None
    output_token_logprobs: list[Entry] = []
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None


class _Error(Struct):
    message: str
    code: int = 0


class Event(Struct, gc=False):
    output_ids: list[TokenId] = []
    meta_info: MetaInfo | None = None
    error: _Error | None = None


class _Scores(Struct):
    input_token_logprobs: list[Entry] = []


class Scored(Struct):
    meta_info: _Scores


class ModelInfo(Struct):
    model_path: str
    tokenizer_path: str | None = None


_EVENTS = msgspec.json.Decoder(list[Event])


class TokenStream:
    """One generation without its I/O: bytes of the event stream in, tokens out.

    An event brings the tokens that are new, or all until now (without `--incremental-streaming-output`, and in older versions
    the log-probabilities even with it): the count of sampled tokens tells which.
    """

    def __init__(self) -> None:
        self._events = Events()
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._size = 0
        self._last = -1
        self._names: set[str] = set()
        self._end: MetaInfo | None = None

    def feed(self, data: bytes) -> Generated | None:
        """The tokens of all events that `data` completes; None if there are none to give yet."""
        for event in _EVENTS.decode(b"[" + b",".join(self._events.feed(data)) + b"]"):
            self.take(event)
        if self._end is not None or not self._ids:
            return None
        generated = Generated(tuple(self._ids), tuple(self._logprobs))
        self._ids.clear()
        self._logprobs.clear()
        return generated

    def end(self) -> Generated:
        """The last tokens with finish, versions and usage."""
        if (meta := self._end) is None or meta.finish_reason is None:
            raise EngineError("the engine's stream ended without a finish reason")
        usage = Usage(meta.prompt_tokens, self._size) if meta.prompt_tokens is not None else None
        finish: EngineFinish = "stop" if meta.finish_reason.type == "tool_calls" else meta.finish_reason.type
        return Generated(tuple(self._ids), tuple(self._logprobs), finish, self._versions(meta), usage)

    def take(self, event: Event) -> None:
        """Note one event; tokens and log-probabilities that do not belong together are refused (T08)."""
        if event.error is not None:
            raise _refused(event.error.message, event.error.code)
        if (meta := event.meta_info) is None:
            return
        if self._end is not None:
            raise EngineError("T06: the engine went on with a reply that it had ended")
        ids = _fresh(event.output_ids, self._size, meta.completion_tokens)
        entries = _fresh(meta.output_token_logprobs, self._size, meta.completion_tokens)
        if (named := [entry[1] for entry in entries]) != ids:
            raise EngineError(f"T08: the engine sent token ids {ids} with log-probabilities for {named}")
        self._ids += ids
        self._logprobs += [math.nan if entry[0] is None else entry[0] for entry in entries]
        self._size = meta.completion_tokens
        self._last = ids[-1] if ids else self._last
        if meta.weight_version is not None:
            self._names.add(meta.weight_version)
        if meta.finish_reason is not None:
            self._check(meta.finish_reason)
            self._end = meta

    def _check(self, finish: _Finish) -> None:
        if finish.type == "abort" and finish.status_code:
            raise _refused(finish.message, finish.status_code)
        if finish.type == "stop" and finish.matched != self._last:
            raise EngineError(f"T06: the engine stopped at {finish.matched!r}, and the last id that it sent is {self._last}")

    def _versions(self, meta: MetaInfo) -> tuple[VersionSpan, ...]:
        if meta.weight_versions is not None:
            spans = [span for span in meta.weight_versions if span.end > span.start]
            return tuple(VersionSpan(span.start, span.end, policy_version(span.version)) for span in spans)
        if len(self._names) != 1:
            seen = ", ".join(sorted(self._names)) or "none"
            raise EngineError(
                f"W01: the engine names no weights for each token, and in this reply it named {seen}: update SGLang"
            )
        return (VersionSpan(0, self._size, policy_version(*self._names)),) if self._size else ()


def _fresh(items: Sequence[Item], before: int, now: int) -> list[Item]:
    """Those that came after `before`, of items that are all `now`, or the new ones."""
    if now == before:
        return []  # an abort repeats what was sent
    if now < before or len(items) not in (now, now - before):
        raise EngineError(f"T08: the engine counts {now} tokens after {before}, and sent {len(items)}")
    return list(items[before - now :])


def _refused(message: str, status: int) -> EngineError:
    kind = EngineRefusal if status == _BAD_REQUEST else EngineError
    return kind(f"the engine failed in mid-stream: {message}")
