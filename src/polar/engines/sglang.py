"""SGLang: by its own route, `/generate` (ids in, ids and log-probabilities out), and by its chat route.

Written from the source of SGLang 0.5.23 and never run against a server here, which needs a GPU: the tests hold it to shapes
that were taken from that source. What matters of it:

- The stop id is the last of `output_ids`, with its log-probability (T06). An end at anything else is refused: where logits are
  NaN, SGLang puts a stop id in the place of what it could not sample.
- Log-probabilities are of the logits after temperature and before truncation, which is neither raw nor processed as soon as
  a truncation counts; with `SGLANG_RETURN_ORIGINAL_LOGPROB=1` in the server's environment they are raw (L01).
- Without `--incremental-streaming-output` each event repeats the whole reply, which costs with the square of its length.
- An abort is for all requests whose id begins with the given one, so ids get an end of their own.
- Paused by `retract`, running requests give up their cache and compute it anew with the new weights (W02).
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import closing
from typing import Any

import msgspec
import numpy as np

from polar.chat import ChatRequest
from polar.engines.chat_wire import MessageWriter
from polar.engines.http import CONTROL_SECONDS, RouteMissing, Server
from polar.engines.protocol import Chatted, EngineInfo, Generated, LogprobsMode, PauseMode, ResolvedSampling
from polar.engines.sglang_chat import CHAT, NO_ROOM, ServerInfo, chat_body, read_reply
from polar.engines.sglang_wire import GenerateRequest, ModelInfo, SamplingParams, Scored, TokenStream, sampling_params
from polar.engines.streaming import Reply
from polar.engines.vllm_chat import PromptMemory, count_body
from polar.engines.vllm_wire import IdText, Models, Tokenized
from polar.errors import EngineError, EngineRefusal
from polar.specs import Float32Array, Int32Array

GENERATE = "/generate"
GOODBYE_SECONDS = 2.0  # how long close() waits for aborts still on their way
PAUSES: dict[PauseMode, str] = {"keep": "retract", "abort": "abort"}

_ENCODER = msgspec.json.Encoder()


class SglangEngine:
    """One SGLang server. Made inside a running event loop, which owns its connections; satisfies `Engine` and `WeightControl`.

    Args:
        url: root of the server, `http://host:port`.
        api_key: sent with every request; empty for a server without one. One that has an admin key too wants that.
    """

    name = "sglang"
    logprobs_mode: LogprobsMode = "processed"  # SGLang's default, where nothing is truncated

    def __init__(self, url: str, api_key: str = "") -> None:
        self._server = Server(url, api_key)
        self._ids = IdText()
        self._prompts = PromptMemory()
        self._messages = MessageWriter("reasoning_content")
        self._free: bool | None = None  # no parser of calls has replies sampled under a grammar; None until asked
        self._aborting: set[asyncio.Task[None]] = set()

    async def generate(
        self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Generated, None]:
        """Stream one generation; what arrives in one read comes as one `Generated`.

        A log-probability that the server sends as null comes as NaN, for detector L02 to name. Closed before its end, the
        generator drops the connection and has the server told to abort, without waiting for the answer.

        Raises:
            EngineError: the server is down, refuses (a prompt beyond its context too), breaks off, or sends what does not
                belong together (T06, T08, W01).
        """
        stream = TokenStream()
        try:
            async with self._server.opened("POST", GENERATE, lambda: self._body(request_id, prompt_ids, sampling)) as reply:
                while data := await reply.read():
                    if (generated := stream.feed(data)) is not None:
                        yield generated
                last = stream.end()
        except BaseException:
            self._abort_soon(request_id)
            raise
        yield last

    async def chat(
        self, request_id: str, request: ChatRequest, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Chatted, None]:
        """One generation from messages, as a single piece: streamed, SGLang's chat route refuses to tell ids. See `generate`."""
        try:
            with self._server.faults(), closing(await self._chat_begun(request_id, request, sampling)) as answer:
                del request  # the history is not held while the reply is read
                chatted = read_reply(await answer.read_all(), lambda text: self._prompts.read(session_id, text))
        except BaseException:
            self._abort_soon(request_id)
            raise
        yield chatted

    async def abort(self, request_id: str) -> None:
        """Stop a generation; its stream ends with finish `abort`. An unknown id is no error."""
        await self._server.post("/abort_request", _ENCODER.encode({"rid": _rid(request_id)}), CONTROL_SECONDS)

    async def info(self) -> EngineInfo:
        """Model, tokenizer directory and context length, those of the base model; and whether it chats: see `_chats`."""
        about = await self._server.get("/model_info", ModelInfo)
        models = (await self._server.get("/v1/models", Models)).data
        base = next((model for model in models if model.parent is None), None)
        if base is None or base.max_model_len is None:
            raise EngineError("SGLang names no base model with a max_model_len in /v1/models")
        return EngineInfo(
            model=base.id,
            model_path=about.tokenizer_path or about.model_path,
            max_model_len=base.max_model_len,
            constrains=True,
            chats=await self._chats(),
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
        """Log-probability of each of `ids[1:]` given what is before it, by prefill; float32[n - 1]."""
        request = GenerateRequest(self._ids.encode(ids), SamplingParams(0), return_logprob=True, logprob_start_len=0)
        answer = await self._server.post(GENERATE, _ENCODER.encode(request))
        with self._server.faults():
            entries = msgspec.json.decode(answer, type=Scored).meta_info.input_token_logprobs
        if [entry[1] for entry in entries] != ids.tolist():
            raise EngineError(f"T08: the engine scored {len(entries)} tokens, which are not the {len(ids)} that it was sent")
        scores = [entry[0] for entry in entries[1:] if entry[0] is not None]
        if len(scores) != len(ids) - 1:
            raise EngineError(f"T08: input_token_logprobs are null for {len(ids) - 1 - len(scores)} of {len(ids)} tokens")
        return np.array(scores, np.float32)

    @property
    def salts_prefixes(self) -> bool:
        """It knows no salt."""
        return False

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling. `keep` puts running generations back into the queue; they go on after `resume`.

        Raises:
            EngineRefusal: for `wait`, which SGLang lacks.
        """
        if mode not in PAUSES:
            raise EngineRefusal(f"SGLang cannot pause by {mode!r}: expected {' or '.join(map(repr, PAUSES))}")
        await self._control("/pause_generation", {"mode": PAUSES[mode]})

    async def resume(self) -> None:
        """Go on sampling."""
        await self._control("/continue_generation", {})

    async def reload_weights(self, path: str) -> None:
        """Load the weights from directory `path`, as the server sees it, and forget cached prefixes. Pause first."""
        await self._control("/update_weights_from_disk", {"model_path": path, "flush_cache": True})

    async def update_version(self, version: int) -> None:
        """Say that tokens sampled from now on are of policy `version`. Unless told otherwise, SGLang would abort what runs."""
        await self._control("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, which old weights computed (W02).

        Raises:
            EngineError: the server kept them, as it does while a generation runs.
        """
        await self._control("/flush_cache", {})

    async def close(self) -> None:
        """Give back connections; aborts on their way get a moment to arrive."""
        if self._aborting:
            _, late = await asyncio.wait(self._aborting, timeout=GOODBYE_SECONDS)
            for task in late:
                task.cancel()
        self._server.close()

    async def _chats(self) -> bool:
        """Whether chat mode can be trusted: not with a parser of tool calls that puts replies under a grammar (L05)."""
        if self._free is None:
            try:
                self._free = not (await self._server.get("/server_info", ServerInfo)).masks
            except RouteMissing:
                self._free = False  # older than what was read here
        return self._free

    async def _chat_begun(self, request_id: str, request: ChatRequest, sampling: ResolvedSampling) -> Reply:
        """The answer once it has begun. A limit beyond the room is refused, and left out then, which has the room as limit."""

        def write(max_tokens: int | None) -> bytes:
            return chat_body(_rid(request_id), request, self._messages.write(request.messages), sampling, max_tokens)

        try:
            return await self._server.begun("POST", CHAT, lambda: write(sampling.max_tokens))
        except EngineRefusal as refusal:
            if NO_ROOM not in str(refusal):
                raise
        return await self._server.begun("POST", CHAT, lambda: write(None))

    def _body(self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling) -> bytes:
        ids, params = self._ids.encode(prompt_ids), sampling_params(sampling)
        return _ENCODER.encode(GenerateRequest(ids, params, return_logprob=True, rid=_rid(request_id), stream=True))

    def _abort_soon(self, request_id: str) -> None:
        if self._server.closed:
            return
        task = asyncio.get_running_loop().create_task(self._abort_quietly(request_id))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort_quietly(self, request_id: str) -> None:
        try:
            await self.abort(request_id)
        except EngineError:
            pass  # the dropped connection says the same, and a server that is gone samples nothing

    async def _control(self, path: str, body: dict[str, Any]) -> bytes:
        return await self._server.post(path, _ENCODER.encode(body))


def _rid(request_id: str) -> str:
    """No request id begins with another one's."""
    return f"{request_id}."
