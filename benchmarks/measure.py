"""Measurements: what a request costs a gateway, what a streamed token costs it, and a thousand sessions in flight.

A lane is one way to the engine: a gateway in one dialect, or none. Measurements go round the lanes in turn, so that what a busy
machine does to one it does to all; medians over the rounds count.
"""

import asyncio
import statistics
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks import stub
from benchmarks.bodies import CHAT, SIZES, Dialect, Json, Template, conversation, post
from benchmarks.load import Address, Callers, Load, ask
from benchmarks.peers import Gateway

PROMPT_IDS = dict(zip(SIZES, stub.CHAT_PROMPTS.values(), strict=True))
SESSIONS = 16  # of each lane and size
CONCURRENCIES = (1, 16)
STREAM_STEP = 0.01  # seconds that the engine takes for a token of every stream
STREAMS_EACH = 1
SETTLE = 0.1  # seconds in which what goes on after a reply is still counted
WATCH_EVERY = 0.1  # seconds between two looks at the memory
HELD = 4.0  # seconds that the engine holds each of the requests in flight


@dataclass(frozen=True)
class Sample:
    """One measurement: CPU seconds of the gateway per call, median latency in seconds."""

    cpu: float
    p50: float


@dataclass
class Lane:
    """One way to the engine. `first_cpu`: CPU seconds of the first call of a session, by size."""

    name: str
    port: int
    gateway: Gateway | None
    ended: bytes = b""
    whole: dict[str, list[Template]] = field(default_factory=dict)
    streamed: list[Template] = field(default_factory=list)
    first_cpu: dict[str, float] = field(default_factory=dict)

    def cpu(self) -> float:
        return self.gateway.cpu() if self.gateway else 0.0


@dataclass
class Results:
    """Samples by lane, size and concurrency; those of streams in CPU seconds per token."""

    whole: dict[tuple[str, str, int], list[Sample]] = field(default_factory=dict)
    streamed: dict[str, list[Sample]] = field(default_factory=dict)

    def cpu(self, lane: str, size: str, concurrency: int) -> float:
        return statistics.median(sample.cpu for sample in self.whole[lane, size, concurrency])

    def p50(self, lane: str, size: str, concurrency: int) -> float:
        return statistics.median(sample.p50 for sample in self.whole[lane, size, concurrency])

    def per_token(self, lane: str) -> float:
        return statistics.median(sample.cpu for sample in self.streamed[lane])


# --- lanes ------------------------------------------------------------------------------------------------------------


async def lane(gateway: Gateway, dialect: Dialect, sizes: Sequence[str]) -> Lane:
    """The lane of a gateway in one dialect. Every session has made its first call."""
    made = Lane(f"{gateway.name} {dialect.name}", gateway.port, gateway, dialect.ended)
    for size in sizes:
        before = gateway.cpu()
        addresses = await gateway.sessions(SESSIONS)
        opening = gateway.cpu() - before
        bodies = await first_calls(addresses, dialect, size, wants_ids=not gateway.key)
        made.first_cpu[size] = (gateway.cpu() - before - opening) / SESSIONS
        made.whole[size] = [dialect.template(at.prefix, body, stream=False) for at, body in zip(addresses, bodies, strict=True)]
        if size == sizes[0]:
            made.streamed = [dialect.template(at.prefix, body, stream=True) for at, body in zip(addresses, bodies, strict=True)]
    return made


async def first_calls(addresses: Sequence[Address], dialect: Dialect, size: str, *, wants_ids: bool) -> list[Json]:
    """Have each session make its first call; the bodies that go on from the answers.

    Args:
        wants_ids: ask for token ids and log-probabilities, as who captures behind a gateway that passes text on has to.
    """
    asked: Json = {"logprobs": True, "return_token_ids": True} if wants_ids else {}
    body = dialect.first(conversation(size)) | asked
    gate = asyncio.Semaphore(SESSIONS)

    async def one(at: Address) -> Json:
        async with gate:
            return dialect.follow(body, await ask(at.port, post(at.prefix + dialect.path, body, dialect.headers)))

    return list(await asyncio.gather(*(one(at) for at in addresses)))


async def straight(port: int, sizes: Sequence[str]) -> list[Lane]:
    """The two ways straight to the engine: text in, and ids in."""
    chat, ids = Lane("engine chat", port, None), Lane("engine ids", port, None)
    for size in sizes:
        (body,) = await first_calls([Address(port)], CHAT, size, wants_ids=True)
        chat.whole[size] = [CHAT.template("", body, stream=False)]
        ids.whole[size] = [_ids_template(PROMPT_IDS[size])]
    return [chat, ids]


def _ids_template(count: int) -> Template:
    params = {"max_tokens": 1000, "temperature": 1.0, "logprobs": 0}
    body: Json = {"token_ids": np.full(count, 504).tolist(), "sampling_params": params, "stream": True, "request_id": "000000"}
    before, _, after = post("/inference/v1/generate", body).rpartition(b"000000")
    return Template(before, after)


# --- measurements -----------------------------------------------------------------------------------------------------


async def set_pace(engine_port: int, *, hold: float = 0.0, step: float = 0.0) -> None:
    """How slow the engine is; see `stub`."""
    await ask(engine_port, post(f"/pace?hold={hold}&step={step}", {}))


async def round_of_calls(lanes: Sequence[Lane], sizes: Sequence[str], seconds: float, results: Results) -> None:
    """Measure every lane once at every size and concurrency."""
    for size in sizes:
        for concurrency in CONCURRENCIES:
            for lane in lanes:
                if concurrency == 1 or lane.gateway:
                    callers = Callers(lane.port, lane.whole[size], concurrency)
                    load, cpu = await _measured(lane, callers, seconds)
                    sample = Sample(cpu / load.calls, statistics.median(load.latencies))
                    results.whole.setdefault((lane.name, size, concurrency), []).append(sample)


async def round_of_streams(lanes: Sequence[Lane], engine_port: int, results: Results) -> None:
    """Measure a streamed token of every gateway, small requests, 16 at a time."""
    await set_pace(engine_port, step=STREAM_STEP)
    for lane in lanes:
        if lane.gateway:
            callers = Callers(lane.port, lane.streamed, SESSIONS, lane.ended)
            load, cpu = await _measured(lane, callers, None)
            sample = Sample(cpu / load.calls / stub.TOKENS, statistics.median(load.latencies))
            results.streamed.setdefault(lane.name, []).append(sample)
    await set_pace(engine_port)


async def _measured(lane: Lane, callers: Callers, seconds: float | None) -> tuple[Load, float]:
    """A load and the CPU seconds that it cost the gateway.

    Raises:
        RuntimeError: a call failed; nothing is measured of a gateway that refuses.
    """
    before = lane.cpu()
    load = await (callers.times(STREAMS_EACH) if seconds is None else callers.for_seconds(seconds))
    await asyncio.sleep(SETTLE)
    if load.errors:
        raise RuntimeError(f"{lane.name}: {len(load.errors)} of {load.calls} calls failed: {load.errors[0]}")
    return load, lane.cpu() - before


# --- many sessions at once --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crowd:
    """Many sessions in flight. Memory in bytes, times in seconds; `first_cpu` and `cpu` per call."""

    name: str
    sessions: int
    idle: int
    peak: int
    p50: float
    worst: float
    first_cpu: float
    cpu: float
    errors: list[str]


async def crowd(gateway: Gateway, engine_port: int, sessions: int) -> Crowd:
    """One medium request of each of many sessions, all at once, held by the engine."""
    addresses = await gateway.sessions(sessions)
    before = gateway.cpu()
    if gateway.key:
        bodies = await first_calls(addresses, CHAT, "medium", wants_ids=False)
    else:
        bodies = await first_calls(addresses[:1], CHAT, "medium", wants_ids=True) * sessions
    first = gateway.cpu() - before
    templates = [CHAT.template(at.prefix, body, stream=False) for at, body in zip(addresses, bodies, strict=True)]
    del bodies
    await set_pace(engine_port, hold=HELD)
    idle, started = gateway.memory(), gateway.cpu()
    load, peak = await _watched(gateway, Callers(gateway.port, templates, sessions).times(1))
    await set_pace(engine_port)
    p50, worst = (statistics.median(load.latencies), max(load.latencies)) if load.latencies else (0.0, 0.0)
    cpu = (gateway.cpu() - started) / sessions
    return Crowd(gateway.name, sessions, idle, peak, p50, worst, first / sessions, cpu, load.errors)


async def _watched(gateway: Gateway, work: Awaitable[Load]) -> tuple[Load, int]:
    """What came of `work`, and the most memory that the gateway had meanwhile."""
    peak = gateway.memory()
    working = asyncio.ensure_future(work)
    while not working.done():
        await asyncio.wait({working}, timeout=WATCH_EVERY)
        peak = max(peak, gateway.memory())
    return await working, peak
