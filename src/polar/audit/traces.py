"""What is checked of the traces that the builders make of a session: an obvious recount, token by token."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import numpy as np

from polar.audit.calls import sampled_calls
from polar.audit.ground import Ground, Numbers
from polar.audit.passages import Passages
from polar.audit.proof import Proof
from polar.errors import CaptureError
from polar.specs import Accounting, BuilderName, ExcludedReason, Finding, SessionResult, Trace, Trajectory
from polar.tokens.records import Call
from polar.trajectory.builders import RESULT_BUILDER, Captured, build

EVERY_BUILDER: tuple[BuilderName, ...] = get_args(BuilderName)
ROUNDING = 1e-9  # of weights: float64 fractions


def check_traces(captured: Captured, ground: Ground, result: SessionResult | None) -> Proof:
    """Every claim about traces, for every builder, and the session's result against the recount."""
    reward = result.reward if result else None
    reasons = exclusions(captured.calls, ground)
    counted = recount(captured.calls, reasons, reward)
    findings: list[Finding] = []
    built: list[Trajectory] = []
    for builder in EVERY_BUILDER:
        try:
            built.append(build(captured, builder=builder, status=result.status if result else "completed", reward=reward))
        except CaptureError as error:
            findings.append(Finding("build", f"{builder}: {error}"))
    wanted = _trainable(captured.calls, reasons, ground)
    for trajectory in built:
        findings += _check_trajectory(trajectory, captured.calls, ground, reward, counted, wanted)
    if result is not None:
        findings += _check_result(result, built, counted)
    return Proof(findings, _checked(built, ground, result, any(finding.code == "path" for finding in findings)), counted)


def _check_result(result: SessionResult, built: Sequence[Trajectory], counted: Accounting) -> Iterator[Finding]:
    for trajectory in built:
        if trajectory.builder == RESULT_BUILDER and result.traces != (made := len(trajectory.traces)):
            yield Finding("ledger", f"the ledger says {result.traces} traces, {trajectory.builder} makes {made}")
    if result.accounting != counted:
        yield Finding("ledger", f"the ledger says {_text(result.accounting)}, the calls hold {_text(counted)}")


def _checked(built: Sequence[Trajectory], ground: Ground, result: SessionResult | None, lost: bool) -> dict[str, int]:
    """What claims about traces were checked of; a builder that refuses the session leaves only `build`."""
    checked = {"build": 1}
    if len(built) < len(EVERY_BUILDER):
        return checked
    checked |= {
        "path": sum(len(trajectory.traces) for trajectory in built),
        "mask": sum(len(node.ids) for node in ground.nodes if node.kind == "sampled"),
        "accounting": 1,
        "weights": int(result is not None and result.reward is not None),
        "ledger": int(result is not None),
    }
    if not lost:  # without its path, the values of a trace have nothing to be held against
        checked["mask_values"] = sum(int(trace.loss_mask.sum()) for trace in built[0].traces)
    return checked


def _check_trajectory(
    trajectory: Trajectory, calls: Sequence[Call], ground: Ground, reward: float | None, counted: Accounting, wanted: Numbers
) -> Iterator[Finding]:
    name, traces = trajectory.builder, trajectory.traces
    trained = np.zeros(len(ground.ids), np.int64)
    free = {call.call_id: [choice.node for choice in call.choices if choice.node is not None] for call in calls}
    for index, trace in enumerate(traces):
        path = _claim_path(trace, free, ground)
        if path is None:
            yield Finding("path", f"{name}: no path of the tree has the ids of trace {index}", trace.call_ids[-1])
            continue
        numbers = path[len(trace.prompt_ids) :]
        trained[numbers[trace.loss_mask == 1]] += 1  # a path has no token twice
        if fault := _values_fault(trace, numbers, ground):
            yield Finding("mask_values", f"{name}, trace {index}: {fault}", trace.call_ids[-1])
    yield from _check_mask(name, trained, wanted, ground)
    if trajectory.accounting != counted or not counted.holds:
        yield Finding("accounting", f"{name}: {_text(trajectory.accounting)}, counted again {_text(counted)}")
    if fault := _weights_fault(traces, reward):
        yield Finding("weights", f"{name}: {fault}")


def _claim_path(trace: Trace, free: dict[str, list[int]], ground: Ground) -> Numbers | None:
    """The path of a trace, by the sampled span that it ends with; a span is claimed once.

    Twins (two choices of the same words) look alike. One that others go on from is no end while there is another.
    """
    ids = np.concatenate([trace.prompt_ids, trace.response_ids])
    ours = free.get(trace.call_ids[-1], [])
    paths = {node: path for node in ours if np.array_equal(ground.ids[path := ground.through(node)], ids)}
    if not paths:
        return None
    end = min(paths, key=lambda node: (ground.continued(node), node))
    ours.remove(end)
    return paths[end]


def _values_fault(trace: Trace, numbers: Numbers, ground: Ground) -> str:
    mask = trace.loss_mask == 1
    if not np.isin(trace.loss_mask, (0, 1)).all():
        return "the mask holds something else than 0 and 1"
    if trace.response_logprobs[mask].tobytes() != ground.logprobs[numbers[mask]].tobytes():
        return "log-probabilities under the mask are not the stored ones"
    if trace.response_logprobs[~mask].any():
        return "a token that is not trained has a log-probability"
    spans = [np.full(span.end - span.start, span.policy_version, np.int32) for span in trace.policy_versions]
    if not np.array_equal(np.concatenate(spans) if spans else np.empty(0, np.int32), ground.versions[numbers[mask]]):
        return "policy versions under the mask are not the stored ones"
    return ""


def _trainable(calls: Sequence[Call], reasons: Mapping[str, ExcludedReason], ground: Ground) -> Numbers:
    """How often each token of the tree must be trained: once where it is trainable, else never."""
    wanted = np.zeros(len(ground.ids), np.int64)
    for node_id, call in sampled_calls(calls).items():
        wanted[ground.tokens(node_id)] = call.call_id not in reasons
    return wanted


def _check_mask(builder: str, trained: Numbers, wanted: Numbers, ground: Ground) -> Iterator[Finding]:
    for node in ground.nodes:
        numbers = ground.tokens(node.node_id)
        wrong = numbers[trained[numbers] != wanted[numbers]]
        if len(wrong):
            place, said = int(wrong[0] - numbers[0]), f"is trained {trained[wrong[0]]} times, not {wanted[wrong[0]]}"
            yield Finding("mask", f"{builder}: token {place} of {node.kind} node {node.node_id} {said}", node.call_id)


def _weights_fault(traces: Sequence[Trace], reward: float | None) -> str:
    masked = [int(trace.loss_mask.sum()) for trace in traces]
    if any(trace.reward != reward for trace in traces):
        return f"a trace has another reward than its session, {reward}"
    for index, (trace, tokens) in enumerate(zip(traces, masked, strict=True)):
        share = tokens / max(sum(masked), 1) if reward is not None else 0.0
        if not abs(trace.weight - share) <= ROUNDING:  # NaN is near nothing
            return f"trace {index} weighs {trace.weight}; with reward {reward} and {tokens} of {sum(masked)} tokens it is {share}"
    return ""


def recount(calls: Sequence[Call], reasons: Mapping[str, ExcludedReason], reward: float | None) -> Accounting:
    """The accounting identity from the calls alone."""
    excluded: Counter[ExcludedReason] = Counter()
    trained = 0
    for call in calls:
        if call.call_id in reasons:
            excluded[reasons[call.call_id]] += call.sampled
            continue
        if call.tail:
            excluded["stop_tail"] += call.tail
        if reward is None and call.sampled > call.tail:
            excluded["no_reward"] += call.sampled - call.tail
        else:
            trained += call.sampled - call.tail
    return Accounting(sum(call.sampled for call in calls), trained, dict(excluded))


def exclusions(calls: Sequence[Call], ground: Ground) -> dict[str, ExcludedReason]:
    """Why a call is not trained, by call id. Said again here, so that an error of the builders shows."""
    replaced = {call.replaces for call in calls}
    passages = Passages(calls, ground)
    reasons: dict[str, ExcludedReason] = {}
    for call in calls:
        arrived = _arrived(call, passages)
        if not call.delivered and not arrived:
            reasons[call.call_id] = "undelivered"
        if call.constrained:
            reasons[call.call_id] = "constrained"
        if call.kind == "auxiliary":
            reasons[call.call_id] = "auxiliary"
        if call.status == "aborted":
            reasons[call.call_id] = "aborted"
        if call.call_id in replaced or (not arrived and _asked_again(call, calls, passages)):
            reasons[call.call_id] = "superseded"
        if call.status == "failed":
            reasons[call.call_id] = "untrusted"
        if call.untrained:  # whatever became of it: it is none of the policy's proven tokens
            reasons[call.call_id] = call.untrained
    return reasons


def _arrived(call: Call, passages: Passages) -> bool:
    """A later prompt begins with the prompt and an answer of `call`."""
    return any(passages.last_with(choice.node) > call.ordinal for choice in call.choices if choice.node is not None)


def _asked_again(call: Call, calls: Sequence[Call], passages: Passages) -> bool:
    """C05: cut by length, and asked again: with its prompt, or with its messages and more."""
    if not any(choice.finish_reason == "length" and choice.node is not None for choice in call.choices):
        return False
    if passages.last_beyond(call.prompt, call.kind, calls) > call.ordinal:
        return True
    asked, count = call.message_hashes, len(call.message_hashes)
    later = (other.message_hashes for other in calls if other.ordinal > call.ordinal and other.kind == call.kind)
    # The last message tells most histories apart; comparing all of each with all of each would be cubic.
    return any(said[count - 1 : count] == asked[count - 1 :] and said[:count] == asked for said in later)


def _text(accounting: Accounting) -> str:
    excluded = ", ".join(f"{count} {reason}" for reason, count in sorted(accounting.excluded.items()))
    return f"{accounting.sampled} sampled = {accounting.trained} trained + ({excluded or 'nothing'})"
