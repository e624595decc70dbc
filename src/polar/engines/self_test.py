"""The self-test of an engine: what a trainer relies on is proven when the engine is connected, by a few short generations.

What an engine contradicts is found before anything is sampled for training; what it cannot show is named.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import takewhile
from secrets import token_hex
from typing import TypeVar

import numpy as np

from polar.chat import ChatRequest, Message, TextPart, Usage
from polar.engines import proofs
from polar.engines.proofs import Proof, Sampled, SelfTest
from polar.engines.protocol import Chatted, Engine, EngineFinish, EngineInfo, ResolvedSampling
from polar.errors import CaptureError, EngineError, EngineRefusal
from polar.specs import Int32Array, VersionSpan
from polar.tokens.rendering import ParsedReply, Renderer

PREFIX = "self-test-"  # of its request ids
SECONDS = 120.0  # for all of it: an engine that others use makes it wait
ABORT_SECONDS = 10.0
PLAIN_TOKENS = 8
HOT_TOKENS = 8
HOT = 2.0  # where raw and processed log-probabilities lie far apart; vLLM refuses more
LONG_TOKENS = 512
SPOKEN = "Größe: 東京 {\"a\": [1, 'b']}\n\tif x_1 != 0: return 😀"
QUESTION = (Message("user", (TextPart("Greet the world in one short sentence."),)),)
FOLLOWING = (Message("user", (TextPart("And once more."),)),)

S = TypeVar("S")
T = TypeVar("T")


async def self_test(engine: Engine, info: EngineInfo, renderer: Renderer | None) -> SelfTest:
    """Have `engine` prove what is claimed of it, and set its `logprobs_mode` to what it was found to be.

    Args:
        renderer: what prompts will be rendered with; None for chat mode.

    Raises:
        EngineError: the engine is down, or has not answered in time.
    """
    if not info.shows_ids:
        advice = "train with an engine that shows ids; this one can evaluate, and make data"
        return SelfTest((Proof("T08", "the ids of prompt and reply are shown", "unproven", "it shows text only", advice),))
    try:
        async with asyncio.timeout(SECONDS):
            tested = await _prove(_Asker(engine, info, renderer))
    except TimeoutError:
        raise EngineError(
            f"the engine did not finish its self-test within {SECONDS:.0f} s: is it paused, or overloaded?"
        ) from None
    except CaptureError as error:
        return SelfTest((Proof(error.code, "a reply can be trusted", "failed", str(error), "update the engine"),))
    except EngineError as error:
        await engine.info()  # raises for an engine that is down, which has proven nothing
        return SelfTest((Proof("T08", "a short reply comes whole", "failed", str(error), "see the engine's log"),))
    if tested.logprobs_mode is not None:
        engine.logprobs_mode = tested.logprobs_mode
    return tested


async def sample(engine: Engine, info: EngineInfo, renderer: Renderer | None, max_tokens: int) -> Sampled:
    """A reply of at most so many tokens, sampled at temperature 1 and held to nothing.

    Raises:
        EngineError: the engine is down.
        CaptureError: the reply cannot be trusted.
    """
    return await _Asker(engine, info, renderer).ask("sample", max_tokens, 1.0)


async def _prove(asker: "_Asker") -> SelfTest:
    plain, hot = await _both(asker.ask("plain", PLAIN_TOKENS, 1.0), asker.ask("hot", HOT_TOKENS, HOT))
    plain, hot = await _both(asker.scored(plain), asker.scored(hot))
    stopped, (plain_stop, stop_ids) = await _both(asker.aborted(), _stopped(asker, plain))
    mode, found = proofs.mode(hot, HOT)
    added = await asker.added()
    replies = (plain, hot)
    return SelfTest(
        (
            proofs.bos(added, plain),
            *await _of_mode(asker, plain, added),
            proofs.stop(plain_stop, stop_ids),
            proofs.counts(replies),
            proofs.values(replies),
            proofs.prefill(plain),
            mode,
            proofs.versions(replies),
            stopped,
        ),
        found,
        added[0] if added else None,
    )


async def _of_mode(asker: "_Asker", first: Sampled, added: Sequence[int] | None) -> list[Proof]:
    """What is claimed of who renders."""
    renderer = asker.renderer
    if renderer is None:
        return [proofs.second_turn(first, await asker.second_prompt(first))]
    wrong = None if added is None else await _wrong_vocabulary(asker, renderer, len(added))
    return [proofs.vocabulary(wrong, renderer.stop_ids), proofs.prefix_stability(renderer)]


async def _wrong_vocabulary(asker: "_Asker", renderer: Renderer, added: int) -> str:
    """Where the server's vocabulary is not the renderer's; "" for nowhere."""
    ids = (await asker.engine.tokenize(SPOKEN)).tolist()[added:]
    if (read := renderer.decode(ids)).strip() != SPOKEN:
        return f"the engine's ids of {SPOKEN!r} read {read!r} here"
    for stop_id in renderer.stop_ids:
        spelled = renderer.decode([stop_id])
        if (ids := (await asker.engine.tokenize(spelled)).tolist()[added:]) != [stop_id]:
            return f"turns end with {spelled!r}, id {stop_id}; the engine gives it {ids}"
    return ""


async def _stopped(asker: "_Asker", plain: Sampled) -> tuple[Sampled | None, Sequence[int]]:
    """A reply that met a stop id, and what its stop ids were.

    A model that does not end its turn by itself is stopped at what it surely says: its likeliest first token.
    """
    if asker.renderer is not None and plain.finish == "stop":
        return plain, asker.renderer.stop_ids
    said = (await asker.ask("greedy", 1, 0.0)).ids
    for _ in range(3):  # where two tokens are equally likely, the likeliest may change
        if len(said) == 0:
            break
        stop = int(said[0])
        reply = await asker.ask("stop", 2, 0.0, (stop,))
        if len(reply.ids) == 0 or reply.ids[0] == stop:
            return reply, (stop,)
        said = reply.ids
    return None, ()


class _Asker:
    """Asks one engine, by ids or by messages as calls will."""

    def __init__(self, engine: Engine, info: EngineInfo, renderer: Renderer | None) -> None:
        self.engine = engine
        self.renderer = renderer
        self._info = info
        self._prompt_ids = renderer.render(QUESTION, ()) if renderer else np.empty(0, np.int32)

    async def ask(self, name: str, max_tokens: int, temperature: float, stop_ids: Sequence[int] = ()) -> Sampled:
        """A reply to the question."""
        return await self._collect(_request_id(name), QUESTION, self._sampling(max_tokens, temperature, stop_ids))

    async def second_prompt(self, first: Sampled) -> Int32Array:
        """In chat mode, the prompt of a second turn after `first`."""
        said = first.parsed
        text = (TextPart(said.text),) if said and said.text else ()
        history = (*QUESTION, Message("assistant", text, said.reasoning if said else ""), *FOLLOWING)
        return (await self._collect(_request_id("second"), history, self._sampling(1, 0.0, ()))).prompt_ids

    async def scored(self, reply: Sampled) -> Sampled:
        """`reply` with its scores, where the engine can give them."""
        if not self._info.scores or len(reply.ids) == 0:
            return reply
        try:
            scores = await self.engine.score(np.concatenate([reply.prompt_ids, reply.ids]))
        except EngineRefusal:
            return reply
        return replace(reply, scores=scores[len(reply.prompt_ids) - 1 :])

    async def added(self) -> list[int] | None:
        """Ids that the server puts before every text; None where it does not tokenize."""
        try:
            left, right = [(await self.engine.tokenize(text)).tolist() for text in ("left", "right")]
        except EngineError:
            return None
        return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))]

    async def aborted(self) -> Proof:
        """Start a long reply, have it aborted, and see it end."""
        request_id, tokens, after = _request_id("abort"), 0, 0
        sampling = self._sampling(LONG_TOKENS, HOT, ())
        finish: EngineFinish | None = None
        asked: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(None) as limit, aclosing(self._stream(request_id, QUESTION, sampling)) as stream:
                async for piece in stream:
                    tokens += len(piece.tokens.ids)
                    after += len(piece.tokens.ids) if asked is not None and asked.done() else 0
                    finish = piece.tokens.finish
                    if asked is None and finish is None:
                        limit.reschedule(asyncio.get_running_loop().time() + ABORT_SECONDS)
                        asked = asyncio.create_task(self.engine.abort(request_id))
        except TimeoutError:
            pass
        if asked is not None:
            await asked
        return proofs.abort(finish, tokens, after, told=asked is not None)

    def _sampling(self, max_tokens: int, temperature: float, stop_ids: Sequence[int]) -> ResolvedSampling:
        room = max(1, self._info.max_model_len - len(self._prompt_ids) - 1)
        own = self.renderer.stop_ids if self.renderer else ()
        return ResolvedSampling(min(max_tokens, room), temperature, stop_token_ids=(*own, *stop_ids))

    async def _collect(self, request_id: str, messages: Sequence[Message], sampling: ResolvedSampling) -> Sampled:
        ids: list[int] = []
        logprobs: list[float] = []
        prompt_ids = self._prompt_ids
        finish: EngineFinish | None = None
        versions: tuple[VersionSpan, ...] = ()
        usage: Usage | None = None
        parsed: ParsedReply | None = None
        async with aclosing(self._stream(request_id, messages, sampling)) as stream:
            async for piece in stream:
                ids.extend(piece.tokens.ids)
                logprobs.extend(piece.tokens.logprobs)
                prompt_ids = prompt_ids if piece.prompt_ids is None else piece.prompt_ids
                if piece.tokens.finish is not None:
                    finish, versions, usage = piece.tokens.finish, piece.tokens.versions, piece.tokens.usage
                    parsed = piece.parsed
        if finish is None:
            raise CaptureError("T08", "a reply ended without a finish reason")
        if len(prompt_ids) == 0:
            raise CaptureError("T08", "the engine does not show the prompt's ids")
        return Sampled(prompt_ids, np.array(ids, np.int32), np.array(logprobs, np.float32), finish, versions, usage, parsed)

    async def _stream(
        self, request_id: str, messages: Sequence[Message], sampling: ResolvedSampling
    ) -> AsyncGenerator[Chatted, None]:
        if self.renderer is None:
            request = ChatRequest("", tuple(messages), stream=True)
            async with aclosing(self.engine.chat(request_id, request, sampling)) as chatted:
                async for piece in chatted:
                    yield piece
        else:
            async with aclosing(self.engine.generate(request_id, self._prompt_ids, sampling)) as generated:
                async for tokens in generated:
                    yield Chatted(tokens)


async def _both(left: Awaitable[S], right: Awaitable[T]) -> tuple[S, T]:
    """At the same time; when one fails, the other is awaited all the same."""
    first, second = await asyncio.gather(left, right, return_exceptions=True)
    if isinstance(first, BaseException):
        raise first
    if isinstance(second, BaseException):
        raise second
    return first, second


def _request_id(name: str) -> str:
    return f"{PREFIX}{name}-{token_hex(4)}"
