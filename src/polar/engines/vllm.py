"""vLLM: by its token route, `/inference/v1/generate` (ids in, ids and log-probabilities out), and by its chat route.

The server runs with `--enable-scale-out` (the token route) and `VLLM_SERVER_DEV_MODE=1` (pausing and weights). Where it lacks
the token route, `/v1/completions` stands in. The embedded and the scripted engine serve the same routes. What the server says is
passed on as it is or refused by name; nothing is repaired, and counts are left to the detectors of `polar.tokens`.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from polar.chat import ChatRequest
from polar.engines.chat_wire import ChatReply, MessageWriter
from polar.engines.http import CONTROL_SECONDS, RouteMissing, Server
from polar.engines.protocol import Chatted, EngineInfo, Generated, LogprobsMode, PauseMode, ResolvedSampling
from polar.engines.streaming import Reply
from polar.engines.vllm_adapters import Adapter, Adapters
from polar.engines.vllm_chat import CHAT, PromptMemory, chat_body, count_body
from polar.engines.vllm_completions import COMPLETIONS, completion_body, scoring_body
from polar.engines.vllm_extras import ROUTED_EXPERTS
from polar.engines.vllm_versions import Versions
from polar.engines.vllm_wire import (
    GenerateRequest,
    IdText,
    Models,
    Reset,
    SamplingParams,
    Scored,
    StreamOptions,
    Tokenized,
    TokenStream,
    WeightInfo,
    policy_version,
    structured,
)
from polar.errors import EngineError
from polar.specs import Float32Array, Int32Array

GENERATE = "/inference/v1/generate"
GOODBYE_SECONDS = 2.0  # how long close() waits for aborts still on their way

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
        self._server = Server(url, api_key)
        self._ids = IdText()
        self._prompts = PromptMemory()
        self._messages = MessageWriter("reasoning")
        self._versions = Versions(self._weight_version)
        self._adapters = Adapters(self._server)
        self._aborting: set[asyncio.Task[None]] = set()
        self._has_token_route = True  # until `info` finds out
        self._routes = False  # it was seen to tell which experts it chose

    @property
    def url(self) -> str:
        return self._server.url

    async def generate(
        self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Generated, None]:
        """Stream one generation; what arrives in one read comes as one `Generated`.

        A log-probability that the server sends as null comes as NaN, for detector L02 to name. Closed before its end, the
        generator drops the connection and has the server told to abort, without waiting for the answer.

        Raises:
            EngineError: the server is down, refuses (a prompt beyond its context too), breaks off, or sends tokens and
                log-probabilities that do not belong together (T08).
            CaptureError: W01, new weights came in the course of a generation on `/v1/completions`, which tells no versions.
        """
        if self._has_token_route:
            wire_id, path, write = f"generate-tokens-{request_id}", GENERATE, self._generate_body
        else:
            wire_id, path, write = f"cmpl-{request_id}-0", COMPLETIONS, self._completion_body
        stream = TokenStream()
        with self._adapters.call() as adapter:
            before = None if adapter or self._has_token_route else await self._versions.before()
            model = adapter.name if adapter else None
            try:
                async with self._server.opened("POST", path, lambda: write(request_id, prompt_ids, sampling, model)) as reply:
                    while data := await reply.read():
                        if (generated := stream.feed(data)) is not None:
                            yield generated
                    last = stream.end()
            except BaseException:
                self._abort_soon(wire_id)
                raise
        if adapter is not None:
            last = structs.replace(last, versions=adapter.spans(stream.sampled))
        elif before is not None:
            last = structs.replace(last, versions=await self._versions.since(before, stream.sampled))
        elif last.versions:
            self._versions.seen(last.versions[-1].policy_version)
        self._routes |= ROUTED_EXPERTS in last.extras
        yield last

    async def chat(
        self, request_id: str, request: ChatRequest, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Chatted, None]:
        """Stream one generation from messages; see `generate`. A reply that nobody reads along comes in one piece.

        Raises:
            EngineError: as in `generate`.
            CaptureError: W01, new weights came in the course of the generation: this route tells no versions.
        """
        streamed = request.stream
        reply = ChatReply(lambda text: self._prompts.read(session_id, text))
        with self._adapters.call() as adapter:
            before = 0 if adapter else await self._versions.before()
            try:
                with self._server.faults(), closing(await self._chat_begun(request_id, request, sampling, adapter)) as answer:
                    del request  # the history is not held while the server works
                    if not streamed:
                        reply.whole(await answer.read_all())
                    while data := await answer.read():
                        if (chatted := reply.feed(data)) is not None:
                            yield chatted
            except BaseException:
                self._abort_soon(f"chatcmpl-{request_id}")
                raise
        yield reply.end(adapter.spans(reply.sampled) if adapter else await self._versions.since(before, reply.sampled))

    async def abort(self, request_id: str) -> None:
        """Stop a generation; its stream ends with finish `abort`. An unknown id is no error."""
        # The bare id is answered with 200 and does nothing: vLLM knows the request under the prefix of its route.
        await self._abort(f"generate-tokens-{request_id}", f"chatcmpl-{request_id}", f"cmpl-{request_id}-0")

    async def info(self) -> EngineInfo:
        """Model, tokenizer directory and context length, from `/v1/models`, those of the base model; and what it can."""
        models = (await self._server.get("/v1/models", Models)).data
        base = next((model for model in models if model.parent is None), None)
        if base is None or base.max_model_len is None:
            raise EngineError(f"the engine at {self.url} names no base model with a max_model_len in /v1/models")
        self._has_token_route, completes, chats, _ = await asyncio.gather(
            self._server.has(GENERATE), self._server.has(COMPLETIONS), self._server.has(CHAT), self._versions.learn()
        )
        return EngineInfo(
            model=base.id,
            model_path=base.root or "",
            max_model_len=base.max_model_len,
            constrains=base.owned_by == "vllm",
            token_in=self._has_token_route or completes,
            chats=chats,
        )

    async def tokenize(self, text: str) -> Int32Array:
        """Ids that the server's own tokenizer gives to `text` as a bare prompt; int32[n]."""
        answer = await self._control("/tokenize", {"prompt": text, "add_special_tokens": True})
        with self._server.faults():
            return np.array(msgspec.json.decode(answer, type=Tokenized).tokens, np.int32)

    async def count_prompt(self, request: ChatRequest) -> int:
        """Tokens of the prompt that `chat` would make of a request; see `CountsPrompts`."""
        answer = await self._server.post("/tokenize", count_body(request, self._messages.write(request.messages)))
        with self._server.faults():
            return msgspec.json.decode(answer, type=Tokenized).count

    async def score(self, ids: Int32Array) -> Float32Array:
        """Log-probability of each of `ids[1:]` given what is before it, by prefill; float32[n - 1].

        vLLM needs room for one more token, so `ids` must be shorter than its context.
        """
        prompt, model = self._ids.encode(ids), self._adapters.newest
        if self._has_token_route:
            params = SamplingParams(max_tokens=1, temperature=1.0, top_p=1.0, top_k=0, prompt_logprobs=0)
            answer = await self._server.post(GENERATE, _ENCODER.encode(GenerateRequest(prompt, params, model=model)))
        else:
            answer = await self._server.post(COMPLETIONS, scoring_body(prompt, model))
        with self._server.faults():
            scored = msgspec.json.decode(answer, type=Scored).entries
        try:
            chosen = [entry[token].logprob for token, entry in zip(ids[1:].tolist(), scored[1:], strict=True) if entry]
        except (KeyError, ValueError) as error:
            raise EngineError(f"T08: prompt_logprobs of {len(ids)} tokens lack one: {error}") from error
        if len(chosen) != len(ids) - 1:
            raise EngineError(f"T08: prompt_logprobs are null for {len(ids) - 1 - len(chosen)} of {len(ids)} tokens")
        return np.array(chosen, dtype=np.float32)

    @property
    def salts_prefixes(self) -> bool:
        """A prefix is never reused under another version: requests are salted with it, where the server names it."""
        return self._salt() is not None

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
        """Say that tokens sampled from now on are of policy `version`. A server too old to name versions is named here."""
        try:
            await self._control("/update_weight_version", {"new_version": str(version)})
        except RouteMissing:
            if self._has_token_route:
                raise
        self._versions.name(version)

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, which old weights computed (W02).

        Raises:
            EngineError: the server kept them, as it does while a generation holds blocks.
        """
        answer = await self._control("/reset_prefix_cache")
        with self._server.faults():
            success = msgspec.json.decode(answer, type=Reset).success
        if not success:
            raise EngineError(f"the engine at {self.url} did not reset its prefix cache: a generation still holds blocks of it")

    @property
    def adapters(self) -> tuple[str, ...]:
        """Directories of the LoRA adapters that running calls, or the next ones, need."""
        return self._adapters.paths

    async def load_adapter(self, path: str, version: int) -> None:
        """Have calls begin with the LoRA adapter in directory `path`, as policy `version`; see `AdapterControl`."""
        await self._adapters.load(path, version)

    async def close(self) -> None:
        """Give back connections; aborts on their way get a moment to arrive."""
        if self._aborting:
            _, late = await asyncio.wait(self._aborting, timeout=GOODBYE_SECONDS)
            for task in late:
                task.cancel()
        self._server.close()

    async def _chat_begun(
        self, request_id: str, request: ChatRequest, sampling: ResolvedSampling, adapter: Adapter | None
    ) -> Reply:
        def write() -> bytes:
            messages = self._messages.write(request.messages)
            return chat_body(request_id, request, messages, sampling, self._salt(), adapter.name if adapter else None)

        return await self._server.begun("POST", CHAT, write)

    def _generate_body(self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling, model: str | None) -> bytes:
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprobs=0,
            stop_token_ids=sampling.stop_token_ids,
            structured_outputs=structured(sampling),
            routed_experts_prompt_start=len(prompt_ids) - 1 if self._routes else 0,  # only what sampled, of a long prompt
        )
        ids = self._ids.encode(prompt_ids)
        return _ENCODER.encode(GenerateRequest(ids, params, request_id, self._salt(), True, StreamOptions(), model))

    def _completion_body(self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling, model: str | None) -> bytes:
        return completion_body(request_id, self._ids.encode(prompt_ids), sampling, self._salt(), model)

    def _salt(self) -> str | None:
        """What keeps prefixes that old weights computed from being reused (W02), for a server that names its versions."""
        return None if self._versions.known is None else str(self._versions.known)

    async def _weight_version(self) -> int | None:
        try:
            name = (await self._server.get("/weight_info", WeightInfo)).weight_version
        except RouteMissing:
            return None
        return None if name is None else policy_version(name)

    async def _abort(self, *wire_ids: str) -> None:
        route = "/inference/v1/abort_requests" if self._has_token_route else "/abort_requests"
        await self._server.post(route, _ENCODER.encode({"request_ids": wire_ids}), CONTROL_SECONDS)

    def _abort_soon(self, wire_id: str) -> None:
        if self._server.closed:
            return
        task = asyncio.get_running_loop().create_task(self._abort_quietly(wire_id))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort_quietly(self, wire_id: str) -> None:
        try:
            await self._abort(wire_id)
        except EngineError:
            pass  # the dropped connection says the same, and a server that is gone samples nothing

    async def _control(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        return await self._server.post(path, b"" if body is None else _ENCODER.encode(body))
