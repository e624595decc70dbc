"""What must hold of traces and forests that are read back, for a file may have been cut or changed since it was written.

Each function names the first thing that is wrong, or nothing: a reader refuses the file, and never guesses.
"""

from collections.abc import Sequence, Sized

import numpy as np

from polar.errors import CaptureError
from polar.specs import Accounting, Float32Array, Int32Array, Trace, Trajectory, UInt8Array
from polar.tokens.detectors import check_logprobs, check_versions
from polar.trajectory.chains import NEWEST
from polar.trajectory.forest import NONE, Forest, Int64Array

ROUNDING = 1e-9  # of weights: a sum of a few float64 fractions


def trajectory_fault(trajectory: Trajectory, reward: float | None) -> str:
    """What is wrong with a session that was read whole: its traces, or that they are not all there."""
    accounting, traces = trajectory.accounting, trajectory.traces
    for number, trace in enumerate(traces):
        if fault := trace_fault(trace):
            return f"trace {number}: {fault}"
        if trace.reward != reward:
            return f"trace {number} has reward {trace.reward}, its session {reward}"
    masked = sum(int(trace.loss_mask.sum()) for trace in traces)
    if not accounting.holds or masked != _owed(accounting):
        return f"{masked} tokens are under the mask, and the accounting says {_owed(accounting)} of {accounting.sampled}"
    weight = sum(trace.weight for trace in traces)
    if traces and abs(weight - (0.0 if reward is None else 1.0)) > ROUNDING:
        return f"the weights of a session with reward {reward} sum to {weight}"
    return ""


def _owed(accounting: Accounting) -> int:
    return accounting.trained + accounting.excluded.get("no_reward", 0)


def trace_fault(trace: Trace) -> str:
    """What is wrong with one trace."""
    lengths = [len(array) for array in (trace.response_ids, trace.loss_mask, trace.response_logprobs)]
    if len(set(lengths)) != 1:
        return f"ids, mask and log-probabilities of its response have lengths {lengths}"
    if not trace.loss_mask.any() or not trace.call_ids:
        return "it trains nothing"
    if not all(0 <= place < len(trace.response_messages) for place in trace.answers):
        return f"it has answers at messages {list(trace.answers)} of {len(trace.response_messages)}"
    if (trace.reward is not None and not np.isfinite(trace.reward)) or not 0 <= trace.weight <= 1 + ROUNDING:
        return f"reward {trace.reward} and weight {trace.weight}"
    if not all(0 <= span.policy_version <= NEWEST for span in trace.policy_versions):
        return "a trained token has no policy version"
    try:
        check_versions(trace.policy_versions, int(trace.loss_mask.sum()))
    except CaptureError as error:
        return str(error)
    return _mask_fault(trace.loss_mask, trace.response_logprobs) or _ids_fault(trace.prompt_ids, trace.response_ids)


def _ids_fault(*arrays: Int32Array) -> str:
    return "a token has an id below 0" if any((ids < 0).any() for ids in arrays) else ""


def _mask_fault(mask: UInt8Array, logprobs: Float32Array) -> str:
    if (mask > 1).any():
        return "the mask holds something else than 0 and 1"
    if logprobs[mask == 0].any():
        return "a token that is not trained has a log-probability"
    try:
        check_logprobs(logprobs[mask == 1])
    except CaptureError as error:
        return str(error)
    return ""


def bounds_fault(bounds: Int64Array, tokens: Sequence[Sized], rows: Sequence[Sized]) -> str:
    """What is wrong with things of one or more tokens each that are laid end to end: n have n + 1 bounds, from 0 on.

    Args:
        tokens: what has an entry for each token.
        rows: what has an entry for each thing.
    """
    if not len(bounds) or bounds[0] != 0 or (np.diff(bounds) < 1).any():
        return "bounds are to start at 0 and to rise"
    if any(len(entries) != bounds[-1] for entries in tokens):
        return f"bounds end at token {bounds[-1]}, and arrays have {sorted({len(entries) for entries in tokens})}"
    if any(len(entries) != len(bounds) - 1 for entries in rows):
        return f"bounds are of {len(bounds) - 1}, and others of {sorted({len(entries) for entries in rows})}"
    return ""


def forest_fault(forest: Forest) -> str:
    """What is wrong with a forest."""
    tokens = (forest.ids, forest.positions, forest.loss_mask, forest.logprobs, forest.policy_versions)
    named = (forest.parents, forest.sampled, forest.traces, forest.samplings, forest.sessions, forest.choices)
    return (
        bounds_fault(forest.bounds, tokens, (*named, forest.weights, forest.call_ids))
        or _places_fault(forest)
        or _trained_fault(forest)
        or _mask_fault(forest.loss_mask, forest.logprobs)
        or _ids_fault(forest.ids)
        or _extras_fault(forest)
    )


def _extras_fault(forest: Forest) -> str:
    trained = int(forest.loss_mask.sum())
    odd = (name for name, rows in forest.extras.items() if len(rows) != trained)
    return next((f"{len(forest.extras[name])} rows of {name} for {trained} trained tokens" for name in odd), "")


def _places_fault(forest: Forest) -> str:
    """Parents come first, positions go on from them, and what nodes name is there."""
    nodes, lengths, depths = np.arange(len(forest.parents)), np.diff(forest.bounds), forest.positions[forest.bounds[:-1]]
    if ((forest.parents < NONE) | (forest.parents >= nodes)).any():
        return "a node's parent does not come before it"
    begins = np.where(forest.parents == NONE, 0, (depths + lengths)[forest.parents])
    within = np.arange(len(forest.ids)) - np.repeat(forest.bounds[:-1], lengths)
    if (forest.positions != np.repeat(begins, lengths) + within).any():
        return "positions do not go on from those of the parent"
    if len(forest.rewards) != len(forest.session_ids) or np.isinf(forest.rewards).any():
        return f"{len(forest.session_ids)} sessions have {len(forest.rewards)} rewards"
    if ((forest.sessions < 0) | (forest.sessions >= len(forest.session_ids))).any():
        return "a node is of a session that is not there"
    return "a node names a sampling that is not there" if (forest.samplings >= len(forest.sampling)).any() else ""


def _trained_fault(forest: Forest) -> str:
    """Mask, versions, samplings and weights are of the nodes that a trace trains, and each session weighs 1 or nothing."""
    trained = forest.traces != NONE
    by_token = np.repeat(trained, np.diff(forest.bounds))
    if ((forest.loss_mask == 1) != by_token).any() or (forest.sampled[trained] != 1).any():
        return "the mask is not of the nodes that a trace trains"
    if ((forest.policy_versions != NONE) != by_token).any() or (forest.policy_versions < NONE).any():
        return "policy versions are not of the trained tokens"
    if ((forest.samplings != NONE) != trained).any() or (forest.samplings < NONE).any():
        return "samplings are not of the trained nodes"
    if not (forest.weights >= 0).all() or forest.weights[~trained].any():
        return "weights are not of the trained nodes"
    sums = np.bincount(forest.sessions, forest.weights, len(forest.session_ids))
    owed = np.bincount(forest.sessions[trained], minlength=len(forest.session_ids)).astype(bool) & ~np.isnan(forest.rewards)
    return "the weights of a session do not sum to 1" if (np.abs(sums - owed) > ROUNDING).any() else ""
