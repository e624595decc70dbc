"""vLLM by its token route, `/inference/v1/generate`: ids in, ids and log-probabilities out.

The server runs with `--enable-scale-out` (the route) and `VLLM_SERVER_DEV_MODE=1` (pausing and weights). The embedded and
the scripted engine serve the same routes. What the server says is passed on as it is or refused by name; nothing is
repaired, and counts are left to the detectors of `polar.tokens`.
"""

import asyncio
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec
import numpy as np
from msgspec import Raw, Struct
from numpy.typing import NDArray

from polar.chat import Usage
from polar.engines.keys import KEY_VARIABLE
from polar.engines.protocol import EngineFinish, EngineInfo, Generated, LogprobsMode, ResolvedSampling
from polar.errors import EngineError, EngineRefusal
from polar.specs import Float32Array, Int32Array, VersionSpan

PauseMode = Literal["keep", "wait", "abort"]

CONNECT_SECONDS = 10.0
CONTROL_SECONDS = 30.0  # for what only asks or signals; generations and weights take as long as they take
IDLE_SECONDS = 3.0  # vLLM closes idle connections after 5 s; reusing one at that moment would fail a call
GOODBYE_SECONDS = 2.0  # how long close() waits for aborts still on their way

T = TypeVar("T")


class _StructuredOutputs(Struct):
    """`json` is a JSON schema."""

    json: Raw


class _SamplingParams(Struct, omit_defaults=True):
    """`top_k` 0 is vLLM's "off" too. Every other field is sent, so that no default of the model's files sneaks in (L04)."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    structured_outputs: _StructuredOutputs | None = None


class _StreamOptions(Struct):
    include_usage: bool = True


class _GenerateRequest(Struct, omit_defaults=True):
    token_ids: Raw
    sampling_params: _SamplingParams
    request_id: str | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None


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


class _Scored(Struct):
    prompt_logprobs: list[dict[int, _PromptLogprob] | None] | None


class _Model(Struct):
    id: str
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(Struct):
    data: list[_Model]


class _Reset(Struct):
    success: bool


_CHUNKS = msgspec.json.Decoder(list[_Chunk])
_ENCODER = msgspec.json.Encoder()


class VllmEngine:
    """One vLLM server. Made inside a running event loop, which owns its connections; satisfies `Engine`.

    Args:
        url: root of the server, `http://host:port`.
        api_key: sent with every request; empty for a server without one. vLLM asks for its own (`--api-key`) on `/v1` and
            `/inference` alone, so its development routes stay open to whoever reaches its port.
    """

    name = "vllm"
    logprobs_mode: LogprobsMode = "raw"  # vLLM's default

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self._ids = _IdText()
        self._aborting: set[asyncio.Task[None]] = set()
        self._http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def generate(
        self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling
    ) -> AsyncGenerator[Generated, None]:
        """Stream one generation; what arrives in one read comes as one `Generated`.

        A log-probability that the server sends as null comes as NaN, for detector L02 to name. Closed before its end, the
        generator drops the connection and has the server told to abort, without waiting for the answer.

        Raises:
            EngineError: the server is down, refuses (a prompt beyond its context too), breaks off, or sends tokens and
                log-probabilities that do not belong together (T08).
        """
        stream = _Stream()
        try:
            # Made when it is sent, so that nothing holds it while the engine works.
            async with self._post(
                "/inference/v1/generate", lambda: self._generate_body(request_id, prompt_ids, sampling)
            ) as response:
                while data := await response.content.readany():
                    if (generated := stream.feed(data)) is not None:
                        yield generated
                last = stream.end()
        except BaseException:
            self._abort_soon(request_id)
            raise
        yield last

    async def abort(self, request_id: str) -> None:
        """Stop a generation; its stream ends with finish `abort`. An unknown id is no error."""
        # The bare id is answered with 200 and does nothing: vLLM knows the request under its own prefix.
        body = _ENCODER.encode({"request_ids": [f"generate-tokens-{request_id}"]})
        async with self._post("/inference/v1/abort_requests", body, CONTROL_SECONDS):
            pass

    async def info(self) -> EngineInfo:
        """Model, tokenizer directory and context length, from `/v1/models`; those of the base model."""
        async with self._exchange("GET", "/v1/models", None, CONTROL_SECONDS) as response:
            models = msgspec.json.decode(await response.read(), type=_Models).data
        base = next((model for model in models if model.parent is None), None)
        if base is None or base.max_model_len is None:
            raise EngineError(f"the engine at {self.url} names no base model with a max_model_len in /v1/models")
        return EngineInfo(base.id, base.root or "", base.max_model_len, constrains=base.owned_by == "vllm")

    async def score(self, ids: Int32Array) -> Float32Array:
        """Log-probability of each of `ids[1:]` given what is before it, by prefill; float32[n - 1].

        vLLM needs room for one more token, so `ids` must be shorter than its context.
        """
        params = _SamplingParams(max_tokens=1, temperature=1.0, top_p=1.0, top_k=0, prompt_logprobs=0)
        body = _ENCODER.encode(_GenerateRequest(self._ids.encode(ids), params))
        async with self._post("/inference/v1/generate", body) as response:
            scored = msgspec.json.decode(await response.read(), type=_Scored).prompt_logprobs or []
        try:
            chosen = [entry[token].logprob for token, entry in zip(ids[1:].tolist(), scored[1:], strict=True) if entry]
        except (KeyError, ValueError) as error:
            raise EngineError(f"T08: prompt_logprobs of {len(ids)} tokens lack one: {error}") from error
        if len(chosen) != len(ids) - 1:
            raise EngineError(f"T08: prompt_logprobs are null for {len(ids) - 1 - len(chosen)} of {len(ids)} tokens")
        return np.array(chosen, dtype=np.float32)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling. `keep` freezes running generations, which go on after `resume`."""
        await self._control(f"/pause?mode={mode}")

    async def resume(self) -> None:
        """Go on sampling."""
        await self._control("/resume")

    async def reload_weights(self, path: str) -> None:
        """Load the weights from directory `path`, as the server sees it. Pause first."""
        await self._control("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})

    async def update_version(self, version: int) -> None:
        """Say that tokens sampled from now on are of policy `version`."""
        await self._control("/update_weight_version", {"new_version": str(version)})

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, which old weights computed (W02).

        Raises:
            EngineError: the server kept them, as it does while a generation holds blocks.
        """
        answer = await self._control("/reset_prefix_cache")
        if not msgspec.json.decode(answer, type=_Reset).success:
            raise EngineError(f"the engine at {self.url} did not reset its prefix cache: a generation still holds blocks of it")

    async def close(self) -> None:
        """Give back connections; aborts on their way get a moment to arrive."""
        if self._aborting:
            _, late = await asyncio.wait(self._aborting, timeout=GOODBYE_SECONDS)
            for task in late:
                task.cancel()
        await self._http.close()

    def _generate_body(self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling) -> bytes:
        params = _SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprobs=0,
            stop_token_ids=sampling.stop_token_ids,
            structured_outputs=None if sampling.json_schema is None else _StructuredOutputs(sampling.json_schema),
        )
        ids = self._ids.encode(prompt_ids)
        return _ENCODER.encode(_GenerateRequest(ids, params, request_id, True, _StreamOptions()))

    def _abort_soon(self, request_id: str) -> None:
        if self._http.closed:
            return
        task = asyncio.get_running_loop().create_task(self._abort_quietly(request_id))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort_quietly(self, request_id: str) -> None:
        try:
            await self.abort(request_id)
        except EngineError:
            pass  # the dropped connection says the same, and a server that is gone samples nothing

    async def _control(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        async with self._post(path, b"" if body is None else _ENCODER.encode(body)) as response:
            return await response.read()

    @asynccontextmanager
    async def _post(
        self, path: str, body: bytes | Callable[[], bytes], seconds: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._exchange("POST", path, body, seconds) as response:
            yield response

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: bytes | Callable[[], bytes] | None, seconds: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        headers = {"Content-Type": "application/json"} if body else None
        with self._faults():
            async with self._http.request(
                method, self.url + path, data=body() if callable(body) else body, headers=headers, timeout=timeout
            ) as response:
                if response.status != 200:
                    raise self._refusal(path, response.status, _message(await response.read()))
                yield response

    def _refusal(self, path: str, status: int, said: str) -> EngineError:
        advice = f"; set {KEY_VARIABLE} to the key that the engine was started with" if status == 401 else ""
        kind = EngineRefusal if status == 400 else EngineError
        return kind(f"the engine at {self.url} answered {path} with {status}: {said}{advice}")

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineError(f"no engine answers at {self.url}: is it running? ({error})") from error
        except TimeoutError as error:
            raise EngineError(f"the engine at {self.url} did not answer within {CONTROL_SECONDS:.0f} s") from error
        except aiohttp.ClientError as error:
            # Not its repr, which may show the request's headers, and so the key.
            raise EngineError(f"the engine at {self.url} broke off: {type(error).__name__}: {error}") from error
        except msgspec.DecodeError as error:
            raise EngineError(f"the engine at {self.url} sent what vLLM would not: {error}") from error


class _Stream:
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


class _IdText:
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


def _message(body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        return body[:500].decode(errors="replace")
    return error if isinstance(error, str) else error.message
