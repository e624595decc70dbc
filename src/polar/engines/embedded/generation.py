"""Requests in, tokens out: transformers' continuous batching, with pausing and weights that change under it.

Three threads touch it. The event loop owns the requests; the manager's own thread generates; one control thread does what
needs the generation stopped (pausing, weights, flushing) and scores prompts.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput

from polar.engines.embedded import batching, weights
from polar.engines.embedded.sampling import Draw, Sample, Sampler
from polar.engines.embedded.wire import FinishReason, PauseMode, PromptLogprob, Refused, SamplingParams
from polar.errors import EngineError

FIRST_VERSION = "default"  # vLLM's name for the weights it started with
WATCH_SECONDS = 1.0  # how soon a death of the generating thread is noticed, where it could not say so itself

T = TypeVar("T")


@dataclass
class Generation:
    """One request. Only the event loop reads it; the samples that it may see are the first `ready`."""

    request_id: str
    prompt: list[int]
    draw: Draw
    ready: int = 0
    finish: FinishReason | None = None
    error: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def samples(self) -> list[Sample]:
        """What has been sampled so far."""
        return self.draw.samples[: self.ready]

    async def steps(self) -> AsyncIterator[list[Sample]]:
        """New samples as they are made; the last list, possibly empty, comes when `finish` is set.

        Raises:
            EngineError: generation broke.
        """
        seen = 0
        while True:
            await self.changed.wait()
            self.changed.clear()
            new, seen = self.samples[seen:], self.ready
            if self.error is not None:
                raise EngineError(self.error)
            done = self.finish is not None  # asked before the yield, during which more may come
            if new or done:
                yield new
            if done:
                return

    def end(self, finish: FinishReason | None, error: str | None = None) -> None:
        """No samples come any more."""
        self.finish, self.error = finish, error
        self.changed.set()


class Generator:
    """Generates with one model. Made inside the event loop that owns it.

    Args:
        eos_ids: tokens that end a generation unless it ignores them.
        max_model_len: tokens of prompt and reply together.
        max_num_seqs: requests that generate at the same time.
        kv_cache_gib: memory for keys and values, at least one request of `max_model_len`.
    """

    def __init__(
        self, model: PreTrainedModel, *, eos_ids: frozenset[int], max_model_len: int, max_num_seqs: int, kv_cache_gib: float
    ) -> None:
        self.max_model_len = max_model_len
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.paused = False
        self._eos_ids = eos_ids
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._keys = count()
        self._running: dict[str, Generation] = {}
        self._held: dict[str, Generation] = {}
        self._idle = asyncio.Event()
        self._closed: str | None = None
        self._draws: dict[str, Draw] = {}
        self._sampler = Sampler(self._draws, FIRST_VERSION)
        self._manager = batching.make_manager(
            model,
            self._sampler,
            lambda outputs: self._loop.call_soon_threadsafe(self._deliver, outputs),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_gib=kv_cache_gib,
        )
        self._control = ThreadPoolExecutor(1, "control")
        self._freeze = ExitStack()
        with torch.inference_mode():  # its thread takes this over
            self._manager.start()
        self._watch = self._loop.create_task(self._fail_when_broken())

    def submit(self, request_id: str, prompt: list[int], params: SamplingParams) -> Generation:
        """Start a generation, or hold it while paused.

        Raises:
            Refused: the prompt is empty, has ids outside the vocabulary, or leaves no room for `max_tokens`.
            EngineError: generation has broken or is being shut down.
        """
        self._check(prompt, params)
        if (reason := self.broken()) is not None:
            raise EngineError(reason)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        generation = Generation(request_id, prompt, Draw(params, stop_ids))
        key = str(next(self._keys))
        if self.paused:
            self._held[key] = generation
        else:
            self._start(key, generation)
        return generation

    def abort(self, request_id: str) -> None:
        """End the generations of `request_id` with what they have; their slots are free at the next step."""
        self._drop(lambda generation: generation.request_id == request_id)

    def abandon(self, generation: Generation) -> None:
        """End `generation`, which nobody waits for any more; nothing happens if it has ended."""
        self._drop(lambda other: other is generation)

    def abort_all(self) -> None:
        """End every generation."""
        self._drop(lambda _: True)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; new requests are held. Running ones freeze (`keep`), end first (`wait`) or end now (`abort`)."""
        self.paused = True
        if mode == "abort":
            self.abort_all()
        while mode == "wait" and self._running and self.paused:
            self._idle.clear()
            await self._idle.wait()
        if self.paused:
            await self._controlled(self._freeze_loop)

    async def resume(self) -> None:
        """Go on."""
        self.paused = False
        self._idle.set()
        await self._controlled(self._freeze.close)
        held, self._held = self._held, {}
        for key, generation in held.items():
            self._start(key, generation)

    async def reload_weights(self, directory: Path) -> None:
        """Take over the weights in `directory`, between two steps; running requests are computed again under them.

        Raises:
            Refused: they do not fit. The old ones stay.
        """

        def reload() -> None:
            with self._manager.pause():
                weights.reload_weights(self._model, directory)
                batching.flush(self._manager)

        await self._controlled(reload)

    async def reset_prefix_cache(self) -> None:
        """Forget all keys and values; running requests are computed again."""

        def reset() -> None:
            with self._manager.pause():
                batching.flush(self._manager)

        await self._controlled(reset)

    def update_version(self, version: str) -> None:
        """Name the weights that sample from now on."""
        self._sampler.version = version

    async def score(self, ids: Sequence[int]) -> list[PromptLogprob]:
        """Log-probabilities of `ids[1:]` by a plain forward; see `weights.score`."""
        return await self._controlled(lambda: weights.score(self._model, ids))

    def broken(self) -> str | None:
        """Why nothing generates any more; None while all is well."""
        if self._closed is None and not self._manager.is_running():
            fault = self._manager.background_thread_status.fatal_error
            return f"generation has stopped: {fault!r}. Restart the engine; its log has the traceback"
        return self._closed

    def metrics(self) -> dict[str, int]:
        """Counters, by vLLM's names."""
        counters = batching.counters(self._manager)
        counters["num_requests_waiting"] += len(self._held)
        return counters

    def close_door(self) -> None:
        """Refuse new requests and end those there are: the server shuts down."""
        self._closed = "the engine is shutting down"
        self.abort_all()

    async def close(self) -> None:
        """Stop the threads, after the step that runs."""
        self.close_door()

        def stop() -> None:
            self._freeze.close()
            batching.stop(self._manager)

        await self._loop.run_in_executor(self._control, stop)
        await self._watch
        self._control.shutdown()

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        if not prompt:
            raise Refused("token_ids is empty: expected at least one token", param="token_ids")
        for name, ids in ("token_ids", prompt), ("sampling_params.stop_token_ids", params.stop_token_ids):
            if ids and not (min(ids) >= 0 and max(ids) < self.vocabulary):
                wrong = next(token for token in ids if not 0 <= token < self.vocabulary)
                raise Refused(f"{name} has {wrong}, outside the vocabulary of {self.vocabulary} tokens", param=name)
        if params.min_tokens > params.max_tokens:
            raise Refused("min_tokens is greater than max_tokens", param="sampling_params.min_tokens")
        if len(prompt) + params.max_tokens > self.max_model_len:
            raise Refused(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{params.max_tokens} output tokens and your prompt contains {len(prompt)} input tokens, for a total of "
                f"{len(prompt) + params.max_tokens} tokens. Please reduce the length of the input prompt or max_tokens.",
                param="sampling_params.max_tokens",
            )

    def _start(self, key: str, generation: Generation) -> None:
        self._running[key] = generation
        self._draws[key] = generation.draw
        draw = generation.draw
        self._manager.add_request(
            generation.prompt,
            request_id=key,
            max_new_tokens=draw.params.max_tokens,
            eos_token_id=sorted(draw.stop_ids),
            streaming=True,
        )

    def _drop(self, chosen: Callable[[Generation], bool]) -> None:
        for key, generation in [*self._running.items(), *self._held.items()]:
            if not chosen(generation):
                continue
            if self._held.pop(key, None) is None:
                self._manager.cancel_request(key)
                self._forget(key)
            generation.end("abort")

    def _forget(self, key: str) -> None:
        del self._running[key], self._draws[key]
        if not self._running:
            self._idle.set()

    def _deliver(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            generation = self._running.get(output.request_id)
            if generation is None:  # aborted while its last step ran
                continue
            generation.ready = len(output.generated_tokens)
            if not output.is_finished():
                generation.changed.set()
                continue
            self._forget(output.request_id)
            stopped = bool(output.generated_tokens) and output.generated_tokens[-1] in generation.draw.stop_ids
            generation.end("stop" if stopped else "length", output.error)

    async def _fail_when_broken(self) -> None:
        while (reason := self.broken()) is None:  # noqa: ASYNC110 (a thread that died sets no event)
            await asyncio.sleep(WATCH_SECONDS)
        for generation in [*self._running.values(), *self._held.values()]:
            generation.end(None, reason)

    async def _controlled(self, action: Callable[[], T]) -> T:
        if (reason := self.broken()) is not None:
            raise EngineError(reason)
        return await self._loop.run_in_executor(self._control, action)

    def _freeze_loop(self) -> None:
        self._freeze.close()  # a second pause holds no more than the first
        self._freeze.enter_context(self._manager.pause())
