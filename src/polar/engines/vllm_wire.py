"""What goes over the wire to and from vLLM's token routes, and how a streamed answer is read.

Only what is used is read.
"""

import math
import re

import msgspec
import numpy as np
from msgspec import Raw, Struct
from numpy.typing import NDArray

from polar.chat import Usage
from polar.engines.protocol import EngineFinish, Generated, ResolvedSampling
from polar.engines.streaming import Events
from polar.engines.vllm_extras import extras
from polar.errors import EngineError
from polar.specs import Int32Array, VersionSpan


class StructuredOutputs(Struct, omit_defaults=True):
    """One of them: `json` is a JSON schema."""

    json: Raw | None = None
    regex: str | None = None


class SamplingParams(Struct, omit_defaults=True):
    """`top_k` 0 is vLLM's "off" too. Every other field is sent, so that no default of the model's files sneaks in (L04)."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    routed_experts_prompt_start: int = 0


def structured(sampling: ResolvedSampling) -> StructuredOutputs | None:
    """What the sampled text is held to."""
    return StructuredOutputs(sampling.json_schema, sampling.regex or None) if sampling.constrained else None


class StreamOptions(Struct):
    include_usage: bool = True


class GenerateRequest(Struct, omit_defaults=True):
    token_ids: Raw
    sampling_params: SamplingParams
    request_id: str | None = None
    cache_salt: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    model: str | None = None


class _TokenLogprob(Struct, gc=False):
    token_id: int
    logprob: float | None


class _Logprobs(Struct, gc=False):
    """Of `/inference/v1/generate` each with its token, of `/v1/completions` by place."""

    content: list[_TokenLogprob] | None = None
    token_logprobs: list[float | None] | None = None


class _WeightVersion(Struct, gc=False):
    version: str
    start: int
    end: int


class _Choice(Struct, gc=False):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: EngineFinish | None = None
    weight_versions: list[_WeightVersion] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None


class _Error(Struct):
    message: str


class _Chunk(Struct, gc=False):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _Error | None = None


class _PromptLogprob(Struct, gc=False):
    logprob: float


PromptLogprobs = list[dict[int, _PromptLogprob] | None]


class _ScoredChoice(Struct):
    prompt_logprobs: PromptLogprobs | None = None


class Scored(Struct):
    """The token route tells them once, `/v1/completions` with each choice."""

    prompt_logprobs: PromptLogprobs | None = None
    choices: list[_ScoredChoice] = []

    @property
    def entries(self) -> PromptLogprobs:
        return self.prompt_logprobs or next((choice.prompt_logprobs or [] for choice in self.choices), [])


class _Model(Struct):
    id: str
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class Models(Struct):
    data: list[_Model]


class Tokenized(Struct):
    tokens: list[int]
    count: int = 0


class Reset(Struct):
    success: bool


class WeightInfo(Struct):
    weight_version: str | None = None


_CHUNKS = msgspec.json.Decoder(list[_Chunk])


class TokenStream:
    """One generation without its I/O: bytes of the event stream in, tokens out.

    The finish chunk is held until the stream's end, because the usage comes after it.

    Attributes:
        sampled: how many tokens have come.
    """

    def __init__(self) -> None:
        self.sampled = 0
        self._events = Events()
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish: EngineFinish | None = None
        self._versions: tuple[VersionSpan, ...] = ()
        self._usage: Usage | None = None
        self._routed = ""
        self._masks: list[list[int]] = []

    def feed(self, data: bytes) -> Generated | None:
        """The tokens of all events that `data` completes; None if there are none to give yet."""
        for chunk in _CHUNKS.decode(b"[" + b",".join(self._events.feed(data)) + b"]"):
            self._take(chunk)
        if self._finish is not None or not self._ids:
            return None
        generated = Generated(tuple(self._ids), tuple(self._logprobs))
        self._ids.clear()
        self._logprobs.clear()
        return generated

    def end(self) -> Generated:
        """The last tokens with finish, versions and usage."""
        if self._finish is None and self._usage is not None and not self.sampled + self._usage.completion_tokens:
            self._finish = "abort"  # before the first token, of which vLLM says nothing but the usage
        if self._finish is None:
            raise EngineError("the engine's stream ended without a finish reason")
        told = extras(self._routed, self._masks, self.sampled, self._usage)
        return Generated(tuple(self._ids), tuple(self._logprobs), self._finish, self._versions, self._usage, told)

    def _take(self, chunk: _Chunk) -> None:
        if chunk.error is not None:
            raise EngineError(f"the engine failed in mid-stream: {chunk.error.message}")
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            if choice.token_ids:
                self._take_tokens(choice.token_ids, choice.logprobs)
            if choice.sampling_mask:
                self._masks += choice.sampling_mask
            if choice.finish_reason is not None:
                self._finish = choice.finish_reason
                self._versions = _versions(choice.weight_versions or [])
                self._routed = choice.routed_experts or ""

    def _take_tokens(self, ids: list[int], logprobs: _Logprobs | None) -> None:
        self.sampled += len(ids)
        if logprobs is not None and logprobs.token_logprobs is not None:
            self._take_by_place(ids, logprobs.token_logprobs)
            return
        content = (logprobs.content if logprobs else None) or []
        if len(ids) == 1 == len(content) and ids[0] == content[0].token_id and content[0].logprob is not None:
            self._ids.append(ids[0])  # as it mostly is: one token per event
            self._logprobs.append(content[0].logprob)
            return
        if [entry.token_id for entry in content] != ids:
            named = [entry.token_id for entry in content]
            raise EngineError(f"T08: the engine sent token ids {ids} with log-probabilities for {named}")
        self._ids += ids
        self._logprobs += [math.nan if entry.logprob is None else entry.logprob for entry in content]

    def _take_by_place(self, ids: list[int], logprobs: list[float | None]) -> None:
        if len(ids) != len(logprobs):
            raise EngineError(f"T08: the engine sent {len(ids)} token ids with {len(logprobs)} log-probabilities")
        self._ids += ids
        self._logprobs += [math.nan if value is None else value for value in logprobs]


class IdText:
    """Writes ids as JSON text by looking each up, several times faster than formatting them.

    An id stands in eight bytes with the comma behind it, padded with spaces, which JSON allows.
    """

    _DIGITS = 7

    def __init__(self) -> None:
        self._cells = _cells(1, self._DIGITS)

    def encode(self, ids: Int32Array) -> Raw:
        """A JSON array of ids, at least one, each 0 … 9,999,999."""
        highest = int(ids.view(np.uint32).max())  # a negative id is a huge one
        if highest >= 10**self._DIGITS:
            raise ValueError(f"token ids reach from {ids.min()} to {ids.max()}: expected 0 to {10**self._DIGITS - 1}")
        if highest >= len(self._cells):
            self._cells = _cells(1 << highest.bit_length(), self._DIGITS)
        text = np.full((len(ids) + 1, self._DIGITS + 1), ord(" "), np.uint8)
        self._cells.take(ids, out=text[1:].view(np.uint64)[:, 0], mode="clip")
        text[0, -1], text[-1, -1] = ord("["), ord("]")
        return Raw(text.tobytes())


def _cells(size: int, digits: int) -> NDArray[np.uint64]:
    """The text of each id below `size`, right-aligned in seven bytes, and a comma."""
    text = np.full((size, digits + 1), ord(" "), np.uint8)
    text[:, digits] = ord(",")
    rest = np.arange(size, dtype=np.int32)
    for place in range(digits):
        first = 10**place if place else 0  # the first id that has this digit
        text[first:, digits - 1 - place] = rest[first:] % 10 + ord("0")
        rest //= 10
    return text.view(np.uint64)[:, 0]


def _versions(spans: list[_WeightVersion]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(span.start, span.end, policy_version(span.version)) for span in spans)


def policy_version(name: str) -> int:
    """The number in the name of a weight version.

    Raises:
        EngineError: there is none.
    """
    if name == "default":  # what vLLM calls the weights it started with
        return 0
    if (match := re.fullmatch(r"v?(\d+)", name)) is None:
        raise EngineError(f"weight version {name!r} is no policy version: name versions by number ('7' or 'v7')")
    return int(match[1])
