"""Detectors that look at one prompt or one finished generation. Each refuses by the id of its fault; none repairs."""

from collections.abc import Sequence

import numpy as np

from polar.chat import Usage
from polar.errors import CaptureError
from polar.specs import Extras, Float32Array, Int32Array, VersionSpan

LOGPROB_FLOOR = -1000.0  # below it no sampled token lies: engines use −9999 and the like for "unknown"


def check_bos(prompt_ids: Int32Array, bos_id: int | None) -> None:
    """T05: a prompt begins with one BOS at most.

    Args:
        bos_id: what the model's tokenizer puts before every text; None for nothing, or where nobody knows.

    Raises:
        CaptureError: T05.
    """
    if bos_id is not None and prompt_ids[:2].tolist() == [bos_id, bos_id]:
        raise CaptureError("T05", f"the prompt begins with BOS, id {bos_id}, twice: the template's and the tokenizer's")


def check_counts(ids: Sequence[int], logprobs: Sequence[float], prompt_tokens: int, usage: Usage | None) -> None:
    """T08: as many log-probabilities as ids, and both as many as the engine says.

    Raises:
        CaptureError: T08, or T15 where nothing was sampled at all.
    """
    if not ids:
        raise CaptureError("T15", "the engine ended a reply without a single token")
    if len(ids) != len(logprobs):
        raise CaptureError("T08", f"{len(ids)} sampled ids came with {len(logprobs)} log-probabilities")
    if usage is None:
        raise CaptureError("T08", "the engine gave no usage to check its ids against")
    if usage.completion_tokens != len(ids):
        raise CaptureError("T08", f"{len(ids)} sampled ids came, the engine's usage says {usage.completion_tokens}")
    if usage.prompt_tokens != prompt_tokens:
        raise CaptureError("T08", f"{prompt_tokens} prompt ids were sent, the engine's usage says {usage.prompt_tokens}")


def check_extras(extras: Extras, length: int) -> None:
    """T08: what is told of each token besides is told of all `length` of them.

    Raises:
        CaptureError: T08.
    """
    for name, rows in extras.items():
        if len(rows) != length:
            raise CaptureError("T08", f"{length} sampled ids came with {len(rows)} rows of {name}")


def check_logprobs(logprobs: Float32Array) -> None:
    """L02: every value finite, not positive, above the floor.

    Raises:
        CaptureError: L02, naming the first bad value.
    """
    bad = ~(np.isfinite(logprobs) & (logprobs <= 0.0) & (logprobs > LOGPROB_FLOOR))
    if bad.any():
        place = int(bad.argmax())
        raise CaptureError("L02", f"log-probability {logprobs[place]} of sampled token {place} of {len(logprobs)}")


def check_stop(ids: Sequence[int], finished: bool, stop_ids: Sequence[int]) -> None:
    """T06: a stop id ends the sampled span where the engine says `stop`, and stands nowhere else.

    Raises:
        CaptureError: T06.
    """
    places = [place for place, token in enumerate(ids) if token in stop_ids]
    if finished and (not places or places[-1] != len(ids) - 1):
        raise CaptureError("T06", f"the engine says `stop`, but the last of {len(ids)} ids, {ids[-1]}, is no stop id")
    if places and places[0] != len(ids) - 1:
        raise CaptureError("T06", f"stop id {ids[places[0]]} stands at token {places[0]} of {len(ids)}, and the engine went on")


def check_versions(spans: Sequence[VersionSpan], length: int) -> tuple[VersionSpan, ...]:
    """W01: spans cover exactly `length` tokens; neighbours of one version are joined.

    Raises:
        CaptureError: W01, naming the first token without a version.
    """
    joined: list[VersionSpan] = []
    for span in spans:
        reached = joined[-1].end if joined else 0
        if span.start != reached or span.end <= span.start:
            raise CaptureError("W01", f"token {reached} of {length} has no policy version (next span starts at {span.start})")
        if joined and joined[-1].policy_version == span.policy_version:
            span = VersionSpan(joined.pop().start, span.end, span.policy_version)
        joined.append(span)
    if (joined[-1].end if joined else 0) != length:
        raise CaptureError("W01", f"versions end at token {joined[-1].end if joined else 0} of {length}")
    return tuple(joined)
