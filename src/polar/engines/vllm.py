"""vLLM by its token route, `/inference/v1/generate`: ids in, ids and log-probabilities out.

The server runs with `--enable-scale-out` (the route) and `VLLM_SERVER_DEV_MODE=1` (pausing and weights). The embedded and
the scripted engine serve the same routes. What the server says is passed on as it is or refused by name; nothing is
repaired, and counts are left to the detectors of `polar.tokens`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec
import numpy as np

from polar.engines.keys import KEY_VARIABLE
from polar.engines.protocol import EngineInfo, Generated, LogprobsMode, ResolvedSampling
from polar.engines.streaming import Origin
from polar.engines.vllm_wire import (
    GenerateRequest,
    IdText,
    Models,
    Reset,
    SamplingParams,
    Scored,
    StreamOptions,
    StructuredOutputs,
    TokenStream,
    refusal_text,
)
from polar.errors import EngineError, EngineRefusal
from polar.specs import Float32Array, Int32Array

PauseMode = Literal["keep", "wait", "abort"]

CONNECT_SECONDS = 10.0
CONTROL_SECONDS = 30.0  # for what only asks or signals; generations and weights take as long as they take
IDLE_SECONDS = 3.0  # vLLM closes idle connections after 5 s; reusing one at that moment would fail a call
GOODBYE_SECONDS = 2.0  # how long close() waits for aborts still on their way
REFUSAL_BYTES = 1 << 20  # of a refusal are read

GENERATE = "/inference/v1/generate"

T = TypeVar("T")

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
        self._ids = IdText()
        self._aborting: set[asyncio.Task[None]] = set()
        self._origin = Origin(self.url, api_key, CONNECT_SECONDS, IDLE_SECONDS)
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
        stream = TokenStream()
        try:
            with self._faults():
                reply = await self._origin.post(GENERATE, lambda: self._generate_body(request_id, prompt_ids, sampling))
                with closing(reply):
                    if reply.status != 200:
                        raise self._refusal(GENERATE, reply.status, refusal_text(await reply.read_up_to(REFUSAL_BYTES)))
                    while data := await reply.read():
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
            models = msgspec.json.decode(await response.read(), type=Models).data
        base = next((model for model in models if model.parent is None), None)
        if base is None or base.max_model_len is None:
            raise EngineError(f"the engine at {self.url} names no base model with a max_model_len in /v1/models")
        return EngineInfo(base.id, base.root or "", base.max_model_len, constrains=base.owned_by == "vllm")

    async def score(self, ids: Int32Array) -> Float32Array:
        """Log-probability of each of `ids[1:]` given what is before it, by prefill; float32[n - 1].

        vLLM needs room for one more token, so `ids` must be shorter than its context.
        """
        params = SamplingParams(max_tokens=1, temperature=1.0, top_p=1.0, top_k=0, prompt_logprobs=0)
        body = _ENCODER.encode(GenerateRequest(self._ids.encode(ids), params))
        async with self._post(GENERATE, body) as response:
            scored = msgspec.json.decode(await response.read(), type=Scored).prompt_logprobs or []
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
        if not msgspec.json.decode(answer, type=Reset).success:
            raise EngineError(f"the engine at {self.url} did not reset its prefix cache: a generation still holds blocks of it")

    async def close(self) -> None:
        """Give back connections; aborts on their way get a moment to arrive."""
        if self._aborting:
            _, late = await asyncio.wait(self._aborting, timeout=GOODBYE_SECONDS)
            for task in late:
                task.cancel()
        self._origin.close()
        await self._http.close()

    def _generate_body(self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling) -> bytes:
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprobs=0,
            stop_token_ids=sampling.stop_token_ids,
            structured_outputs=None if sampling.json_schema is None else StructuredOutputs(sampling.json_schema),
        )
        ids = self._ids.encode(prompt_ids)
        return _ENCODER.encode(GenerateRequest(ids, params, request_id, True, StreamOptions()))

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
    async def _post(self, path: str, body: bytes, seconds: float | None = None) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._exchange("POST", path, body, seconds) as response:
            yield response

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: bytes | None, seconds: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        headers = {"Content-Type": "application/json"} if body else None
        with self._faults():
            async with self._http.request(method, self.url + path, data=body, headers=headers, timeout=timeout) as response:
                if response.status != 200:
                    raise self._refusal(path, response.status, refusal_text(await response.read()))
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
