"""What a batch has to prove before it may change weights."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polar.errors import CaptureError
from polar.specs import Float32Array
from polar.training.batch import Batch, Tokens
from polar.training.config import AlgorithmSpec
from polar.trajectory.chains import Sampling
from polar.trajectory.forest import Forest

Mask = NDArray[np.bool_]
SESSION_FACTOR = 10  # by which a session may be further off than all of them together
FEWEST_TOKENS = 8  # of a session whose mean says something


def temperatures(forest: Forest) -> Float32Array:
    """What the trainer divides the logits of each trained token by, so that its log-probabilities are what the engine's are of.

    Raises:
        CaptureError: L01, the tokens were sampled as the trainer cannot reproduce.
    """
    values = np.asarray([temperature(how) for how in forest.sampling] or [1.0], np.float32)
    per_token: Float32Array = values[np.repeat(forest.samplings, np.diff(forest.bounds))[forest.loss_mask.astype(bool)]]
    return per_token


def temperature(how: Sampling) -> float:
    """Likewise, of one way of sampling.

    Raises:
        CaptureError: L01, as `temperatures`.
    """
    if how.top_p != 1 or how.top_k > 0:
        raise CaptureError(
            "L01",
            f"tokens were sampled with top_p {how.top_p:g} and top_k {how.top_k}: what was cut off is not stored, so their "
            "log-probabilities cannot be computed again. Sample with top_p 1 and top_k 0",
        )
    if how.logprobs_mode == "raw" and how.temperature != 1:
        raise CaptureError(
            "L01",
            f"tokens were sampled at temperature {how.temperature:g}, and the engine gave log-probabilities of temperature 1: "
            "sample at 1, or have the engine give processed ones (vLLM: --logprobs-mode processed_logprobs)",
        )
    if how.temperature <= 0:
        raise CaptureError("L01", "greedy answers have no log-probabilities to train on: sample at a temperature above 0")
    return how.temperature


def check_versions(tokens: Tokens, version: int) -> None:
    """No token is from the future, or from nowhere.

    Raises:
        CaptureError: W01.
    """
    if len(tokens.versions) and not (tokens.versions.min() >= 0 and tokens.versions.max() <= version):
        raise CaptureError(
            "W01",
            f"tokens were sampled under versions {tokens.versions.min()} to {tokens.versions.max()}, the trainer's newest is "
            f"{version}",
        )


def check_delta(batch: Batch, tokens: Tokens, logprobs: Float32Array, spec: AlgorithmSpec) -> dict[str, float]:
    """δ: how far the trainer's log-probabilities (float32[t], before the update) are from the engine's; metrics.

    The mean of all tokens is bounded, and so is that of each session, more widely: one that is poisoned must not hide among many.

    Raises:
        CaptureError: L03, δ is above a bound; L02, a value is not finite.
    """
    for whose, values in (("trainer", logprobs), ("engine", tokens.logprobs)):
        if wrong := int((~np.isfinite(values)).sum()):
            raise CaptureError("L02", f"the {whose} gives {wrong} log-probabilities that are not finite")
    distance = np.abs(logprobs - tokens.logprobs)
    staleness = batch.version - tokens.versions
    metrics = {
        "staleness": float(staleness.mean()) if len(staleness) else 0.0,
        "staleness_max": float(staleness.max()) if len(staleness) else 0.0,
    }
    bounds = Bound("delta", spec.max_delta), Bound("delta_stale", spec.max_stale_delta)
    for chosen, bound in zip((staleness == 0, staleness > 0), bounds, strict=True):
        if chosen.any():
            metrics |= _bounded(batch, distance, chosen, bound)
    return metrics


class Bound(NamedTuple):
    """What δ may be, and the name of the metric; the setting is `max_` and that name."""

    name: str
    most: float


def _bounded(batch: Batch, distance: Float32Array, chosen: Mask, bound: Bound) -> dict[str, float]:
    forest, part = batch.forest, distance[chosen]
    mean = float(part.mean())
    owners = np.repeat(forest.sessions, np.diff(forest.bounds))[forest.loss_mask.astype(bool)][chosen]
    counts = np.bincount(owners, minlength=len(forest.session_ids))
    means = np.bincount(owners, part, len(counts)) / np.maximum(counts, 1)
    judged = np.where(counts >= FEWEST_TOKENS, means, 0.0)
    worst = int(judged.argmax() if judged.max() > SESSION_FACTOR * bound.most else means.argmax())
    if not (mean <= bound.most and judged.max() <= SESSION_FACTOR * bound.most):
        session = forest.session_ids[worst]
        raise CaptureError(
            "L03",
            f"trainer and engine differ by {mean:.3g} nats a token on average, and by {means[worst]:.3g} in session {session}; "
            f"allowed are {bound.most:g} ([algorithm] max_{bound.name}), in a session {SESSION_FACTOR} times as much. Nothing "
            "was trained: tokens, log-probabilities or the engine's weights are not what they are said to be",
        )
    return {
        bound.name: mean,
        f"{bound.name}_p99": float(np.quantile(part, 0.99)),
        f"{bound.name}_max": float(part.max()),
        f"{bound.name}_session": float(means.max()),
    }
