"""One choice in the making: what the engine samples, what is read of it, and where a stop text ends it.

A stop text is honoured here, not by the engine: the sampled ids keep the tokens that spell it, the harness is shown what is
before it, and what the engine samples after it is dropped and counted. Readers hold text back, so a stop text may be seen
late; the cut is where a reader of the ids alone would have seen it first.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import numpy as np
from msgspec import structs

from polar.chat import Delta, FinishReason, Message, TextDelta, TextPart, ToolCall, Usage
from polar.engines.protocol import Chatted, Engine, Generated
from polar.errors import EngineError
from polar.gateway.reading import Reader
from polar.gateway.stopping import TextStopper
from polar.ids import tool_call_id
from polar.specs import NO_EXTRAS, Extras, Float32Array, Int32Array, VersionSpan
from polar.tokens.detectors import check_counts, check_extras, check_logprobs, check_stop, check_versions
from polar.tokens.rendering import ParsedReply

log = logging.getLogger(__name__)

Put = Callable[[list[Delta]], None]
Shown = Callable[[Int32Array], None]


class Generation:
    """One choice of one call.

    Args:
        stops: texts that end it.
        patience: seconds that the engine has to end it and tell all once it is told to stop; with 0 it is left at once.

    Attributes:
        ids: all that was sampled, `tail` included.
        tail: tokens at the end of `ids` that came after a stop text; known once `read`.
        finish: what the engine said at the end; "" as long as it goes on, and when it broke off.
        stop_sequence: the stop text that ended it.
        first, last: unix seconds of its first and last token; 0 without one.
        usage: the engine's own counts, with `finish`, where it gives some.
        parsed: the whole reply, once `read`; `exact` says that `tail` is.
    """

    def __init__(self, call_id: str, choice: int, reader: Reader, stops: Sequence[str], patience: float) -> None:
        self.request_id = f"{call_id}-{choice}" if choice else call_id
        self.choice = choice
        self.ids: list[int] = []
        self.tail = 0
        self.finish = ""
        self.first = self.last = 0.0
        self.usage: Usage | None = None
        self.parsed: ParsedReply | None = None
        self.exact = True
        self._call_id = call_id
        self._reader = reader
        self._patience = patience
        self._said: ParsedReply | None = None
        self._stopper = TextStopper(stops)
        self._logprobs: list[float] = []
        self._versions: tuple[VersionSpan, ...] = ()
        self._extras = NO_EXTRAS
        self._engine: Engine | None = None
        self._stopping = False
        self._limit = asyncio.timeout(None)
        self._abort: asyncio.Task[None] | None = None

    @property
    def stop_sequence(self) -> str:
        return self._stopper.found

    @property
    def over(self) -> bool:
        """Nothing that can still be aborted."""
        return bool(self.finish or self.stop_sequence)

    @property
    def sampled(self) -> int:
        """Tokens that the engine sampled: its ids, or of one that shows none what it counted."""
        return len(self.ids) or (self.usage.completion_tokens if self.usage else 0)

    async def run(self, engine: Engine, pieces: AsyncGenerator[Generated | Chatted, None], put: Put, shown: Shown) -> None:
        """Sample to the end.

        Args:
            pieces: the generation, as `engine` streams it.
            put: takes text and reasoning as they are certain.
            shown: takes the prompt's ids from an engine that renders it itself.

        Raises:
            EngineError: from the engine.
        """
        try:
            async with self._limit, aclosing(pieces):
                self._engine = engine
                if self._stopping:
                    self._abort_now(engine)
                async for piece in pieces:
                    put(self._take(piece) if isinstance(piece, Generated) else self._take_chatted(piece, shown))
        except TimeoutError:
            if self._patience:
                log.warning("call %s: the engine did not end an aborted generation in %s s", self.request_id, self._patience)
        finally:
            self._engine = None

    def stop(self) -> None:
        """Have the engine abort: now, or as soon as it is asked."""
        if not self._stopping and not self.finish:
            self._stopping = True
            if self._engine is not None:
                self._abort_now(self._engine)

    def read(self) -> list[Delta]:
        """Read to the end: the deltas still held back. `parsed` is there afterwards."""
        deltas, self.parsed = self._reader.finish(self._said)
        shown = self._show(deltas, last=True)
        if self.stop_sequence:
            self.parsed, kept, self.exact = self._reader.cut(self.ids, self._stopper.shown, self.stop_sequence)
            self.tail = len(self.ids) - kept
        return shown

    def check(self, prompt_tokens: int, stop_ids: Sequence[int]) -> None:
        """Whether the tokens can be trusted.

        Args:
            stop_ids: none where nobody knows them (chat mode): the next prompt shows how a turn ends.

        Raises:
            CaptureError: they cannot; names the detector.
        """
        check_counts(self.ids, self._logprobs, prompt_tokens, self.usage)
        check_extras(self._extras, len(self.ids))
        check_logprobs(np.asarray(self._logprobs, np.float32))
        if stop_ids:
            kept = self.ids[: len(self.ids) - self.tail]
            check_stop(kept, self.finish == "stop" and not self.stop_sequence, stop_ids)
        self._versions = check_versions(self._versions, len(self.ids))

    def kept(self) -> tuple[Int32Array, Float32Array, tuple[VersionSpan, ...]]:
        """Ids, log-probabilities and version spans of a checked generation, without its tail."""
        length = len(self.ids) - self.tail
        versions = tuple(structs.replace(span, end=min(span.end, length)) for span in self._versions if span.start < length)
        return np.asarray(self.ids[:length], np.int32), np.asarray(self._logprobs[:length], np.float32), versions

    def kept_extras(self) -> Extras:
        """What the engine told besides of what is `kept`."""
        return {name: rows[: len(self.ids) - self.tail] for name, rows in self._extras.items()} if self._extras else NO_EXTRAS

    def message(self) -> Message:
        """What the harness is told; tool calls get their ids here."""
        assert self.parsed is not None
        calls = tuple(
            ToolCall(tool_call_id(self._call_id, self.choice, index), name, arguments)
            for index, (name, arguments) in enumerate(self.parsed.tool_calls)
        )
        text = (TextPart(self.parsed.text),) if self.parsed.text else ()
        return Message("assistant", text, self.parsed.reasoning, calls)

    def finish_reason(self) -> FinishReason | None:
        """None for a generation that has no proper end."""
        assert self.parsed is not None
        if self.stop_sequence or self.finish == "stop":
            return "tool_calls" if self.parsed.tool_calls else "stop"
        return "length" if self.finish == "length" else None

    def _take(self, chunk: Generated, said: Sequence[Delta] = ()) -> list[Delta]:
        deltas: list[Delta] = []
        if chunk.ids or said:
            self.last = time.time()
            self.first = self.first or self.last
            deltas = self._read(chunk.ids, said)
            self.ids.extend(chunk.ids)
            self._logprobs.extend(chunk.logprobs)
        if chunk.finish is not None:
            self.finish, self._versions, self.usage = chunk.finish, chunk.versions, chunk.usage
            self._extras = chunk.extras
        return deltas

    def _take_chatted(self, piece: Chatted, shown: Shown) -> list[Delta]:
        if piece.prompt_ids is not None:
            shown(piece.prompt_ids)
        self._said = piece.parsed
        return self._take(piece.tokens, piece.deltas)

    def _read(self, ids: Sequence[int], said: Sequence[Delta]) -> list[Delta]:
        ended = bool(self.stop_sequence)
        deltas = [] if ended else self._show(self._reader.push(ids, said))
        if self.stop_sequence:
            self.stop()
        return deltas

    def _show(self, deltas: list[Delta], *, last: bool = False) -> list[Delta]:
        """Deltas as the harness may see them: of this choice, and not beyond a stop text."""
        if self._stopper.active:
            texts = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
            kept: list[Delta] = [delta for delta in deltas if not isinstance(delta, TextDelta)]
            text = self._stopper.push(texts) + (self._stopper.finish() if last else "")
            deltas = [*kept, TextDelta(text)] if text else kept
        return [structs.replace(delta, choice=self.choice) for delta in deltas] if self.choice else deltas

    def _abort_now(self, engine: Engine) -> None:
        self._limit.reschedule(asyncio.get_running_loop().time() + self._patience)
        if self._patience:
            self._abort = asyncio.create_task(self._abort_upstream(engine))

    async def _abort_upstream(self, engine: Engine) -> None:
        try:
            await engine.abort(self.request_id)
        except EngineError as error:
            log.warning("abort of call %s: %s", self.request_id, error)
