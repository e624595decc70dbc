"""Computes the log-probabilities of a run again, by prefill, and compares them with what was recorded.

The mean absolute difference δ is what off-policy training lives with (L03): numerics that drift between sampling and
prefill, a wrong context, wrong weights. Only what is comparable is compared; the rest is counted by reason.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polar.engines.protocol import Engine
from polar.errors import UsageError
from polar.specs import Finding, Float32Array, Int32Array, Trace
from polar.tokens.records import Call
from polar.trajectory.builders import Captured, build

AT_ONCE = 4  # prefills in flight
POSITION_EDGES = (0, 256, 1024, 4096, 16_384, 65_536)  # tokens before the compared one


@dataclass(frozen=True)
class Tolerance:
    """How far recorded and recomputed may lie apart, in nats: on average, and for each token."""

    mean: float
    each: float


# One engine in float32 repeats itself to 1e-4; a half-precision one drifts by 0.01 on average, and its rare tokens by far more.
EXACT = Tolerance(mean=1e-4, each=0.01)
APPROXIMATE = Tolerance(mean=0.05, each=float("inf"))


@dataclass(frozen=True)
class Delta:
    """Statistics of |recomputed − recorded| over some tokens, in nats; NaN for none."""

    tokens: int
    mean: float
    p99: float
    max: float


@dataclass(frozen=True)
class Rescoring:
    """What the comparison says.

    Attributes:
        traces: sequences that were scored.
        by_turn: by the place of the answer in its trace, from 0.
        by_position: by the number of tokens before, as `from` → statistics (see `POSITION_EDGES`).
        skipped: sampled tokens that were not compared, by reason.
        findings: L03.
    """

    traces: int
    overall: Delta
    by_turn: dict[int, Delta]
    by_position: dict[int, Delta]
    skipped: dict[str, int]
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class _Compared:
    """One token each: recorded and recomputed value, turn, position, and the index of its call in `calls`."""

    recorded: Float32Array
    recomputed: Float32Array
    turn: Int32Array
    position: Int32Array
    calls: tuple[str, ...]

    @property
    def delta(self) -> NDArray[np.float64]:
        return np.abs(self.recomputed.astype(np.float64) - self.recorded)


async def rescore(
    engine: Engine, sessions: Sequence[Captured], tolerance: Tolerance, scored: Callable[[], None] = lambda: None
) -> Rescoring:
    """Score every trace of `sessions` once, and compare.

    Args:
        engine: with the weights that sampled the run; Polar cannot see whether it has them, the result shows it.
        scored: called after each trace.

    Raises:
        UsageError: the run was sampled under several policy versions, and the engine holds one of them at most.
        EngineError: the engine fails.
    """
    _refuse_versions(sessions)
    room = (await engine.info()).max_model_len
    skipped: Counter[str] = Counter()
    jobs: list[tuple[Trace, dict[str, Call]]] = []
    for captured in sessions:
        trajectory = build(captured, builder="prefix_merging", status="completed", reward=0.0)
        for reason, count in trajectory.accounting.excluded.items():
            skipped[f"excluded: {reason}"] += count
        calls = {call.call_id: call for call in captured.calls}
        jobs += [(trace, calls) for trace in trajectory.traces]
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(trace: Trace, calls: dict[str, Call]) -> _Compared:
        async with gate:
            compared = await _compare(engine, trace, calls, room, skipped)
        scored()
        return compared

    return _summary(await asyncio.gather(*(one(*job) for job in jobs)), skipped, tolerance)


def _refuse_versions(sessions: Sequence[Captured]) -> None:
    versions = {span.policy_version for captured in sessions for node in captured.nodes for span in node.versions}
    if len(versions) > 1:
        named = ", ".join(map(str, sorted(versions)))
        raise UsageError(
            f"the run was sampled under policy versions {named}; an engine does not say which one it has, so nothing can be "
            "compared. Rescore a run of one version"
        )


async def _compare(engine: Engine, trace: Trace, calls: dict[str, Call], room: int, skipped: Counter[str]) -> _Compared:
    ids = np.concatenate([trace.prompt_ids, trace.response_ids])
    places = np.flatnonzero(trace.loss_mask).astype(np.int32) + np.int32(len(trace.prompt_ids))
    begins = [calls[call_id].prompt_tokens for call_id in trace.call_ids]
    turns = (np.searchsorted(begins, places, side="right") - 1).astype(np.int32)
    usable = np.array([_comparable(calls[call_id]) for call_id in trace.call_ids])[turns]
    within = places < room - 1  # vLLM generates a token after what it scores
    skipped["sampling cannot be reproduced by prefill"] += int((~usable).sum())
    skipped["beyond the engine's context"] += int((usable & ~within).sum())
    kept = usable & within
    if kept.any():
        values = await engine.score(ids[: room - 1])
        recomputed = values[places[kept] - 1]
    else:
        recomputed = np.empty(0, np.float32)
    recorded = trace.response_logprobs[places[kept] - len(trace.prompt_ids)]
    return _Compared(recorded, recomputed, turns[kept], places[kept], trace.call_ids)


def _comparable(call: Call) -> bool:
    """L01: prefill gives raw log-probabilities; processed ones are the same only where nothing was processed."""
    untouched = {"temperature": 1.0, "top_p": 1.0, "top_k": 0.0}
    return call.logprobs_mode == "raw" or all(call.resolved.get(name) == value for name, value in untouched.items())


def _summary(parts: Sequence[_Compared], skipped: Counter[str], tolerance: Tolerance) -> Rescoring:
    empty = np.empty(0)
    delta = np.concatenate([empty, *(part.delta for part in parts)])
    turns = np.concatenate([empty, *(part.turn for part in parts)])
    buckets = np.searchsorted(POSITION_EDGES, np.concatenate([empty, *(part.position for part in parts)]), side="right") - 1
    overall = statistics(delta)
    return Rescoring(
        traces=len(parts),
        overall=overall,
        by_turn={int(turn): statistics(delta[turns == turn]) for turn in np.unique(turns)},
        by_position={POSITION_EDGES[bucket]: statistics(delta[buckets == bucket]) for bucket in np.unique(buckets)},
        skipped={reason: count for reason, count in sorted(skipped.items()) if count},
        findings=tuple(_findings(parts, overall, tolerance)),
    )


def statistics(delta: NDArray[np.float64]) -> Delta:
    """Mean, 99th percentile and maximum."""
    if not len(delta):
        return Delta(0, np.nan, np.nan, np.nan)
    return Delta(len(delta), float(delta.mean()), float(np.quantile(delta, 0.99)), float(delta.max()))


def _findings(parts: Sequence[_Compared], overall: Delta, tolerance: Tolerance) -> Iterator[Finding]:
    if overall.mean > tolerance.mean:
        yield Finding(
            "L03", f"recomputed log-probabilities differ by {overall.mean:.2g} on average; {tolerance.mean:g} is tolerated"
        )
    for part in parts:
        far = np.flatnonzero(~(part.delta <= tolerance.each))
        for turn in np.unique(part.turn[far]):
            first = far[part.turn[far] == turn][0]
            recorded, recomputed = part.recorded[first], part.recomputed[first]
            said = f"the token at {part.position[first]} was recorded with {recorded:.4f}, recomputed it has {recomputed:.4f}"
            yield Finding("L03", said, part.calls[turn])
