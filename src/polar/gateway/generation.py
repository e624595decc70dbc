"""One choice in the making: what the engine samples, what the parser reads of it, and where a stop text ends it.

A stop text is honoured here, not by the engine: the sampled ids keep the tokens that spell it, the harness is shown what is
before it, and what the engine samples after it is dropped and counted. Parsers hold text back, so a stop text may be seen
late; the cut is where a reader of the ids alone would have seen it first.
"""

import asyncio
import bisect
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing

import numpy as np
from msgspec import structs

from polar.chat import Delta, FinishReason, Message, TextDelta, TextPart, ToolCall, Usage
from polar.engines.protocol import Engine, Generated, ResolvedSampling
from polar.errors import EngineError
from polar.ids import tool_call_id
from polar.specs import Float32Array, Int32Array, VersionSpan
from polar.tokens.detectors import check_counts, check_logprobs, check_stop, check_versions
from polar.tokens.rendering import ParsedReply, Renderer

log = logging.getLogger(__name__)
_ANCHOR = 64  # characters before a stop text by which it is found among what the ids spell
ABORT_PATIENCE = 5.0  # seconds that an engine has to end an aborted stream

Put = Callable[[list[Delta]], None]


class Generation:
    """One choice of one call.

    Attributes:
        ids: all that was sampled, `tail` included.
        tail: tokens at the end of `ids` that came after a stop text; known once `read`.
        finish: what the engine said at the end; "" as long as it goes on, and when it broke off.
        stop_sequence: the stop text that ended it.
        first, last: unix seconds of its first and last token; 0 without one.
        parsed: the whole reply, once `read`.
    """

    def __init__(self, call_id: str, choice: int, renderer: Renderer, stops: Sequence[str]) -> None:
        self.request_id = f"{call_id}-{choice}" if choice else call_id
        self.choice = choice
        self.ids: list[int] = []
        self.tail = 0
        self.finish = ""
        self.first = self.last = 0.0
        self.parsed: ParsedReply | None = None
        self._call_id = call_id
        self._fresh_parser = renderer.parser
        self._decode = renderer.decode
        self._parser = renderer.parser()
        self._stopper = TextStopper(stops)
        self._logprobs: list[float] = []
        self._versions: tuple[VersionSpan, ...] = ()
        self._usage: Usage | None = None
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

    async def run(self, engine: Engine, prompt_ids: Int32Array, sampling: ResolvedSampling, put: Put) -> None:
        """Sample to the end; text and reasoning go to `put` as they are certain.

        Raises:
            EngineError: from the engine.
        """
        chunks = engine.generate(self.request_id, prompt_ids, sampling)
        try:
            async with self._limit, aclosing(chunks):
                self._engine = engine
                if self._stopping:
                    self._abort_now(engine)
                async for chunk in chunks:
                    put(self._take(chunk))
        except TimeoutError:
            log.warning("call %s: the engine did not end an aborted generation in %s s", self.request_id, ABORT_PATIENCE)
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
        deltas, self.parsed = self._parser.finish()
        shown = self._show(deltas, last=True)
        if self.stop_sequence:
            kept = self._shortest()
            self.tail = len(self.ids) - kept
            self.parsed = structs.replace(self._parse(kept), text=self._stopper.shown)
        return shown

    def _shortest(self) -> int:
        """How many ids say all that was shown, and the stop text after it."""
        shown, stop = self._stopper.shown, self.stop_sequence
        size = _first(len(self.ids), lambda size: self._parse(size).text.startswith(shown + stop))
        # A parser gives whitespace out when words follow: those are not kept.
        text = self._decode(self.ids[:size])
        at = text.rfind(shown[-_ANCHOR:] + stop)
        if at < 0:
            return size
        said = text[: at + len(shown[-_ANCHOR:]) + len(stop)]
        return _first(size, lambda size: self._decode(self.ids[:size]).startswith(said))

    def _parse(self, size: int) -> ParsedReply:
        """The first `size` ids, read on their own."""
        parser = self._fresh_parser()
        parser.push(self.ids[:size])
        return parser.finish()[1]

    def check(self, prompt_tokens: int, stop_ids: Sequence[int]) -> None:
        """Whether the tokens can be trusted.

        Raises:
            CaptureError: they cannot; names the detector.
        """
        check_counts(self.ids, self._logprobs, prompt_tokens, self._usage)
        check_logprobs(np.asarray(self._logprobs, np.float32))
        if self.stop_sequence:
            check_stop(self.ids[: len(self.ids) - self.tail], False, stop_ids)
        else:
            check_stop(self.ids, self.finish == "stop", stop_ids)
        self._versions = check_versions(self._versions, len(self.ids))

    def kept(self) -> tuple[Int32Array, Float32Array, tuple[VersionSpan, ...]]:
        """Ids, log-probabilities and version spans of a checked generation, without its tail."""
        length = len(self.ids) - self.tail
        versions = tuple(structs.replace(span, end=min(span.end, length)) for span in self._versions if span.start < length)
        return np.asarray(self.ids[:length], np.int32), np.asarray(self._logprobs[:length], np.float32), versions

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

    def _take(self, chunk: Generated) -> list[Delta]:
        deltas: list[Delta] = []
        if chunk.ids:
            self.last = time.time()
            self.first = self.first or self.last
            deltas = self._read(chunk.ids)
            self.ids.extend(chunk.ids)
            self._logprobs.extend(chunk.logprobs)
        if chunk.finish is not None:
            self.finish, self._versions, self._usage = chunk.finish, chunk.versions, chunk.usage
        return deltas

    def _read(self, ids: Sequence[int]) -> list[Delta]:
        ended = bool(self.stop_sequence)
        deltas = [] if ended else self._show(self._parser.push(ids))
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
        self._limit.reschedule(asyncio.get_running_loop().time() + ABORT_PATIENCE)
        self._abort = asyncio.create_task(self._abort_upstream(engine))

    async def _abort_upstream(self, engine: Engine) -> None:
        try:
            await engine.abort(self.request_id)
        except EngineError as error:
            log.warning("abort of call %s: %s", self.request_id, error)


def _first(size: int, holds: Callable[[int], bool]) -> int:
    """The smallest number below `size` for which something holds that also holds for all larger ones; else `size`."""
    return bisect.bisect_left(range(size), True, key=holds)


class TextStopper:
    """Watches a text in pieces for the first of some stop texts; holds back what may be the start of one.

    Attributes:
        active: there are stop texts.
        shown: the text given out so far; never any of a stop text.
        found: the stop text that came; "" for none yet.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.active = bool(stops)
        self.shown = ""
        self.found = ""

    def push(self, text: str) -> str:
        """Take the next piece; give what may be shown."""
        if self.found:
            return ""
        text = self._held + text
        places = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            place, self.found = min(places)
            self._held = ""
            return self._give(text[:place])
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return self._give(text[: len(text) - keep])

    def finish(self) -> str:
        """The text has ended: what was held back is text."""
        held, self._held = self._held, ""
        return self._give(held)

    def _give(self, text: str) -> str:
        self.shown += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
