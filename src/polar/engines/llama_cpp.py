"""llama.cpp's server by its own route, `/completion`: ids in, ids and log-probabilities out.

What was seen of it (b11549, as PyPI's `xllamacpp` 2026.10 serves it):

- Streamed, the server shows no id of a token that ends inside a character, as most tokens of an emoji do (T08). Unstreamed it
  shows every id, but samples on when nobody listens any more. So a reply is asked for in short steps, each going on from the
  ids of the last; what is sampled does not depend on where a step ends. A grammar does: a constrained reply is one step.
- Log-probabilities are of the raw logits: before temperature, truncation, biases and grammar. Of a token that ends inside a
  character the server tells none; it is then asked what it gives that token after the same ids, as for `score`.
- The token that ends a turn is one of the ids and has its log-probability (T06). A stop id that the model's file does not
  list as an end of generation does not stop the server; the reply is cut after it here.
- The weights do not change: everything is of version 0.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence

import msgspec
import numpy as np
from msgspec import UNSET

from polar.chat import ChatRequest, Usage
from polar.engines.http import CONTROL_SECONDS, Server
from polar.engines.llama_cpp_wire import EVERY, Completion, CompletionRequest, Props, Shown, Tokenized, matched
from polar.engines.protocol import Chatted, EngineFinish, EngineInfo, Generated, LogprobsMode, ResolvedSampling
from polar.engines.vllm_wire import IdText
from polar.errors import EngineError, EngineRefusal
from polar.specs import Float32Array, Int32Array, VersionSpan

STEP = 16  # tokens: what an aborted generation may still cost, and how often a harness sees something
MANY = 256  # likeliest tokens that are asked for before all are
FORCED = 1e6  # a bias that leaves one token only

_ESCAPED = re.compile(r"\\.|[/\n]", re.DOTALL)  # one that is escaped already stays as it is
_ESCAPES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
_ENCODER = msgspec.json.Encoder()


class LlamaCppEngine:
    """One llama.cpp server. Made inside a running event loop, which owns its connections; satisfies `Engine`.

    Args:
        url: root of the server, `http://host:port`.
        api_key: sent with every request; empty for a server without one.
    """

    name = "llama_cpp"
    logprobs_mode: LogprobsMode = "raw"

    def __init__(self, url: str, api_key: str = "") -> None:
        self._server = Server(url, api_key)
        self._ids = IdText()
        self._running: dict[str, asyncio.Event] = {}  # set to abort
        self._asking = asyncio.Lock()
        self._slots: asyncio.Semaphore | None = None
        self._letter_id: int | None = None

    async def generate(
        self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Generated, None]:
        """Sample a reply, a piece for each step. Closed before its end, the server still finishes the step.

        Raises:
            EngineError: the server is down, refuses (a prompt beyond its context too), breaks off, or sends what cannot be
                trusted (T08, T10).
        """
        aborted = self._running[request_id] = asyncio.Event()
        try:
            async with await self._free_slot():
                async for piece in self._steps(prompt_ids, sampling, aborted):
                    yield piece
        finally:
            self._running.pop(request_id, None)

    def chat(
        self, request_id: str, request: ChatRequest, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Chatted, None]:
        """Refused: the server's chat routes hide the ids of the prompt."""
        raise EngineRefusal("llama.cpp is asked for ids only")

    async def abort(self, request_id: str) -> None:
        """Stop a generation after the step that runs; its stream ends with finish `abort` and what was sampled."""
        if (aborted := self._running.get(request_id)) is not None:
            aborted.set()

    async def info(self) -> EngineInfo:
        """Model and context length, of one of the server's slots."""
        props = await self._props()
        return EngineInfo(props.model_alias, "", props.default_generation_settings.n_ctx, constrains=True)

    async def tokenize(self, text: str) -> Int32Array:
        """Ids that the server gives to `text` as a bare prompt, with the special tokens that it adds; int32[n]."""
        return np.array(await self._tokenize(text, special=True), np.int32)

    async def score(self, ids: Int32Array) -> Float32Array:
        """Log-probability of each of `ids[1:]` given what is before it; float32[n - 1].

        The longest part is prefilled anew, and each shorter one is a prefix of it. It takes a request per token: seconds for
        a reply, an hour for a long session.
        """
        last = len(ids) - 1
        scores = [await self._given(ids[:place], int(ids[place]), cached=place < last) for place in range(last, 0, -1)]
        return np.array(scores[::-1], np.float32)

    async def close(self) -> None:
        """Give back connections."""
        self._server.close()

    async def _steps(
        self, prompt_ids: Int32Array, sampling: ResolvedSampling, aborted: asyncio.Event
    ) -> AsyncGenerator[Generated, None]:
        ids, size = prompt_ids, 0
        finish: EngineFinish | None = None
        while finish is None:
            room = sampling.max_tokens - size
            request = self._request(ids, sampling, room if sampling.constrained else min(STEP, room))
            done = await self._complete(request)
            done.check()
            kept = _through_stop(done.tokens, sampling.stop_token_ids)
            size += kept
            finish = _finish(done, kept, sampling, request.n_predict, size)
            ids = np.concatenate([ids, np.array(done.tokens[:kept], np.int32)])
            logprobs = await self._filled(ids, matched(done.tokens, done.completion_probabilities)[:kept])
            if finish is None and aborted.is_set():
                finish = "abort"
            piece = Generated(tuple(done.tokens[:kept]), logprobs)
            if finish is not None:
                versions = (VersionSpan(0, size, 0),) if size else ()
                usage = Usage(done.tokens_evaluated + kept - size, size)
                piece = Generated(piece.ids, piece.logprobs, finish, versions, usage)
            yield piece

    def _request(self, ids: Int32Array, sampling: ResolvedSampling, count: int) -> CompletionRequest:
        return CompletionRequest(
            prompt=self._ids.encode(ids),
            n_predict=count,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            json_schema=sampling.json_schema if sampling.json_schema is not None else UNSET,
            grammar=_grammar(sampling.regex) if sampling.regex else UNSET,
        )

    async def _free_slot(self) -> asyncio.Semaphore:
        """To be held during a generation: were there more of them than slots, each step would push out another's cache."""
        async with self._asking:
            if self._slots is None:
                self._slots = asyncio.Semaphore((await self._props()).total_slots)
            return self._slots

    async def _props(self) -> Props:
        return await self._server.get("/props", Props)

    async def _filled(self, ids: Int32Array, logprobs: Sequence[float | None]) -> tuple[float, ...]:
        """The log-probabilities of the last of `ids`, the unknown ones looked up: backwards, as the server keeps prefixes."""
        filled, start = list(logprobs), len(ids) - len(logprobs)
        for place in range(len(filled) - 1, -1, -1):
            if filled[place] is None:
                filled[place] = await self._given(ids[: start + place], int(ids[start + place]))
        return tuple(value for value in filled if value is not None)

    async def _given(self, before: Int32Array, token: int, *, cached: bool = True) -> float:
        """The log-probability that the model gives `token` after `before`.

        Biases do not change what the server tells, so the token is forced. One that ends inside a character is looked for
        among the likeliest at the place of a letter.
        """
        for place in await self._forced(before, token, 1, cached):
            if place.id == token:
                return place.value
        letter = await self._letter()
        for count in (MANY, EVERY):
            for place in await self._forced(before, letter, count, cached):
                for entry in place.top_logprobs:
                    if entry.id == token:
                        return entry.value
        raise EngineError(f"T08: the engine gives token {token} no log-probability")

    async def _forced(self, before: Int32Array, token: int, count: int, cached: bool) -> list[Shown]:
        request = CompletionRequest(self._ids.encode(before), 1, 0.0, n_probs=count, cache_prompt=cached)
        request.logit_bias = ((token, FORCED),)
        return (await self._complete(request)).completion_probabilities

    async def _letter(self) -> int:
        if self._letter_id is None:
            ids = await self._tokenize("a", special=False)
            if not ids:
                raise EngineError("T08: the engine has no token for the letter 'a'")
            self._letter_id = ids[-1]
        return self._letter_id

    async def _complete(self, request: CompletionRequest) -> Completion:
        answer = await self._server.post("/completion", _ENCODER.encode(request))
        with self._server.faults():
            return msgspec.json.decode(answer, type=Completion)

    async def _tokenize(self, text: str, *, special: bool) -> list[int]:
        body = _ENCODER.encode({"content": text, "add_special": special, "parse_special": True})
        answer = await self._server.post("/tokenize", body, CONTROL_SECONDS)
        with self._server.faults():
            return msgspec.json.decode(answer, type=Tokenized).tokens


def _through_stop(ids: Sequence[int], stop_ids: Sequence[int]) -> int:
    """How many ids there are up to the first that stops."""
    return next((place + 1 for place, token in enumerate(ids) if token in stop_ids), len(ids))


def _finish(done: Completion, kept: int, sampling: ResolvedSampling, asked: int, size: int) -> EngineFinish | None:
    """How the reply ends with this step of `asked` tokens, the `size` first; None if it goes on."""
    if done.stop_type == "eos" or (kept and done.tokens[kept - 1] in sampling.stop_token_ids):
        return "stop"
    if done.stop_type != "limit":
        raise EngineError(f"T06: the engine ended a reply for a reason that nobody gave it: {done.stop_type!r}")
    full = len(done.tokens) < asked  # the context is
    return "length" if full or size >= sampling.max_tokens else None


def _grammar(regex: str) -> str:
    """For servers that have LLGuidance, as `xllamacpp` does; another refuses it."""
    return "%llguidance {}\nstart: /" + _ESCAPED.sub(lambda found: _ESCAPES.get(found[0], found[0]), regex) + "/\n"
