"""What goes over the wire to and from vLLM's token route, and how a streamed answer is read."""

import math
import re

import msgspec
import numpy as np
from msgspec import Raw, Struct
from numpy.typing import NDArray

from polar.chat import Usage
from polar.engines.protocol import EngineFinish, Generated
from polar.errors import EngineError
from polar.specs import Int32Array, VersionSpan


class StructuredOutputs(Struct):
    """`json` is a JSON schema."""

    json: Raw


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


class StreamOptions(Struct):
    include_usage: bool = True


class GenerateRequest(Struct, omit_defaults=True):
    token_ids: Raw
    sampling_params: SamplingParams
    request_id: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None


class _TokenLogprob(Struct, gc=False):
    token_id: int
    logprob: float | None


class _Logprobs(Struct, gc=False):
    content: list[_TokenLogprob] | None


class _WeightVersion(Struct, gc=False):
    version: str
    start: int
    end: int


class _Choice(Struct, gc=False):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: EngineFinish | None = None
    weight_versions: list[_WeightVersion] | None = None


class _Error(Struct):
    message: str


class _Chunk(Struct, gc=False):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _Error | None = None


class _ErrorBody(Struct):
    error: _Error | str


class _PromptLogprob(Struct, gc=False):
    logprob: float


class Scored(Struct):
    prompt_logprobs: list[dict[int, _PromptLogprob] | None] | None


class _Model(Struct):
    id: str
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class Models(Struct):
    data: list[_Model]


class Reset(Struct):
    success: bool


_CHUNKS = msgspec.json.Decoder(list[_Chunk])


class TokenStream:
    """One generation without its I/O: bytes of the event stream in, tokens out.

    The finish chunk is held until the stream's end, because the usage comes after it.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish: EngineFinish | None = None
        self._versions: tuple[VersionSpan, ...] = ()
        self._usage: Usage | None = None

    def feed(self, data: bytes) -> Generated | None:
        """The tokens of all events that `data` completes; None if there are none to give yet."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        events = [line[5:] for line in lines if line[:5] == b"data:" and line != b"data: [DONE]"]
        for chunk in _CHUNKS.decode(b"[" + b",".join(events) + b"]"):
            self._take(chunk)
        if self._finish is not None or not self._ids:
            return None
        generated = Generated(tuple(self._ids), tuple(self._logprobs))
        self._ids.clear()
        self._logprobs.clear()
        return generated

    def end(self) -> Generated:
        """The last tokens with finish, versions and usage."""
        if self._finish is None:
            raise EngineError("the engine's stream ended without a finish reason")
        return Generated(tuple(self._ids), tuple(self._logprobs), self._finish, self._versions, self._usage)

    def _take(self, chunk: _Chunk) -> None:
        if chunk.error is not None:
            raise EngineError(f"the engine failed in mid-stream: {chunk.error.message}")
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            if choice.token_ids:
                self._take_tokens(choice.token_ids, choice.logprobs)
            if choice.finish_reason is not None:
                self._finish = choice.finish_reason
                self._versions = _versions(choice.weight_versions or [])

    def _take_tokens(self, ids: list[int], logprobs: _Logprobs | None) -> None:
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
    return tuple(VersionSpan(span.start, span.end, _policy_version(span.version)) for span in spans)


def _policy_version(name: str) -> int:
    if name == "default":  # what vLLM calls the weights it started with
        return 0
    if (match := re.fullmatch(r"v?(\d+)", name)) is None:
        raise EngineError(f"weight version {name!r} is no policy version: name versions by number ('7' or 'v7')")
    return int(match[1])


def refusal_text(body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        return body[:500].decode(errors="replace")
    return error if isinstance(error, str) else error.message
