"""One generation of the scripted engine while it runs, and the truth about it."""

import asyncio
import time
from base64 import b64encode
from collections.abc import AsyncIterator
from io import BytesIO
from itertools import groupby
from typing import Protocol

import numpy as np
from msgspec import Struct

from polar.engines.script import Scripted


class Logged(Struct):
    """The truth about one generation.

    Attributes:
        ids, logprobs, versions: of each sampled token, in order; equally long. Values are exact in float32.
        finish: `stop`, `length` or `abort`; empty while it runs, and when it died.
        aborted_at: unix seconds at which the abort, or the end of the connection, was noticed.
        freed_at: unix seconds at which the generation was over.
        cache_salt: what keeps its prefix from being shared; empty for nothing.
        experts_from: the token of the prompt from which on it was to tell experts.
        model: the LoRA adapter that it asked for; empty for none.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[str] = []
    finish: str = ""
    aborted_at: float | None = None
    freed_at: float | None = None
    cache_salt: str = ""
    experts_from: int = 0
    model: str = ""


class Host(Protocol):
    """What a generation needs of the engine that runs it."""

    version: str
    resumed: asyncio.Event

    def free(self, generation: "Generation") -> None:
        """Note that it is over."""
        ...


class Generation:
    """One generation that runs: samples what was planned, and stops when told.

    Args:
        wire_id: its id as vLLM's route for aborts knows it.
    """

    def __init__(
        self, host: Host, wire_id: str, entry: Logged, script: Scripted, ids: list[int], logprobs: list[float], finish: str
    ) -> None:
        self.wire_id = wire_id
        self.entry = entry
        self._host = host
        self._script = script
        self._ids = ids
        self._logprobs = logprobs
        self._finish = finish
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Abort, unless it is over."""
        if self.entry.freed_at is None and not self._stopped.is_set():
            self.entry.aborted_at = time.time()
            self._stopped.set()

    async def pieces(self) -> AsyncIterator[int]:
        """Where each piece that is to be told starts; the last comes when the finish reason is known, unless the script dies."""
        sent, total, held = 0, len(self._ids), self._script.hold_before_end != 0.0
        while len(self.entry.ids) < total:
            count = min(self._script.tokens_per_chunk, total - len(self.entry.ids))
            await self._wait(count * self._script.delay_per_token)
            if self._stopped.is_set():
                break
            self._sample(count)
            if self._script.fault == "die" and len(self.entry.ids) * 2 >= total:
                self._host.free(self)
                return
            if held or len(self.entry.ids) < total:
                yield sent
                sent = len(self.entry.ids)
        await self._hold()
        self.entry.finish = "abort" if self._stopped.is_set() else self._finish
        self._host.free(self)
        yield sent

    def logprobs(self, start: int) -> list[tuple[int, float | None]]:
        """The sampled tokens from `start` on with their log-probabilities, as the script would have them told."""
        told: list[tuple[int, float | None]] = list(zip(self.entry.ids[start:], self.entry.logprobs[start:], strict=True))
        if start:
            return told
        match self._script.fault:
            case "missing_logprob":
                return told[1:]
            case "nan_logprob":
                return [(told[0][0], None), *told[1:]]
            case "sentinel_logprob":
                return [(told[0][0], -9999.0), *told[1:]]
            case _:
                return told

    def spans(self) -> list[dict[str, object]]:
        """The versions of all sampled tokens."""
        spans: list[dict[str, object]] = []
        end = 0
        for version, tokens in groupby(self.entry.versions):
            start, end = end, end + len(list(tokens))
            spans.append({"version": version, "start": start, "end": end})
        if self._script.fault == "version_gap":
            spans[0]["start"] = 1
        return spans

    def routed_experts(self) -> str | None:
        """What vLLM tells at the end: the experts of each token that it was asked for, but the last."""
        if not (self._script.extras and self.entry.finish):
            return None
        passed = [*self.entry.prompt_ids, *self.entry.ids][self.entry.experts_from : -1]
        file = BytesIO()
        np.save(file, np.asarray([experts(token) for token in passed], np.uint8))
        return b64encode(file.getvalue()).decode()

    def sampling_mask(self, start: int) -> list[list[int]] | None:
        """The ids that could have been sampled instead of each token from `start` on."""
        if not self._script.extras:
            return None
        masks = [support(token) for token in self.entry.ids[start:]]
        return masks[1:] if self._script.fault == "missing_extra" and not start else masks

    def usage(self) -> dict[str, int]:
        """Counts as vLLM tells them."""
        completion = len(self.entry.ids) + (self._script.fault == "usage_off_by_one")
        prompt = len(self.entry.prompt_ids)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def _sample(self, count: int) -> None:
        start = len(self.entry.ids)
        self.entry.ids += self._ids[start : start + count]
        self.entry.logprobs += self._logprobs[start : start + count]
        self.entry.versions += [self._host.version] * count

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(0)  # sockets get their turn, so that a hang-up is seen between any two chunks
        if seconds:
            await self._until(None, seconds)
        if not self._host.resumed.is_set():
            await self._until(self._host.resumed, None)

    async def _hold(self) -> None:
        hold = self._script.hold_before_end
        if isinstance(hold, asyncio.Event):
            await self._until(hold, None)
        elif hold:
            await self._until(None, hold)

    async def _until(self, event: asyncio.Event | None, seconds: float | None) -> None:
        """Return when stopped, when `event` is set, or after `seconds`."""
        waits = {asyncio.ensure_future(each.wait()) for each in (self._stopped, event) if each is not None}
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def experts(token: int) -> list[list[int]]:
    """The experts that two layers of a made-up model choose for a token, two of eight each."""
    return [[token % 8, token // 8 % 8], [token // 64 % 8, token // 512 % 8]]


def support(token: int) -> list[int]:
    """What top-k left of a made-up distribution from which `token` was sampled: one id to three."""
    return [token + step for step in range(1 + token % 3)]
