"""Token tree to traces.

`per_request` makes a trace of every answer. `prefix_merging` makes a trace of every chain of answers in which each prompt
starts with the whole of what came before. Either way each trainable sampled token has mask 1 in exactly one trace, and
each sampled token that no trace trains is counted under a named reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from msgspec import structs

from polar.chat import Message, Tool
from polar.errors import CaptureError
from polar.specs import (
    Accounting,
    Branch,
    BuilderName,
    ExcludedReason,
    Finding,
    Float32Array,
    Int32Array,
    SessionStatus,
    Trace,
    TrainingPolicy,
    Trajectory,
    UInt8Array,
    VersionSpan,
)
from polar.tokens.records import ROOT, Call, Node, Position
from polar.tokens.tree import TokenTree
from polar.trajectory.chains import Answer, Sampling, chains, sampling, token_versions, trainable
from polar.trajectory.exclusion import PLAIN, excluded_calls

RESULT_BUILDER: BuilderName = "prefix_merging"  # what a session's result counts


@dataclass(frozen=True)
class Captured:
    """All that was recorded of a session. `messages` and `tools` are the content-addressed tables, decoded."""

    calls: Sequence[Call]
    nodes: Sequence[Node]
    messages: Mapping[str, Message]
    tools: Mapping[str, tuple[Tool, ...]]


def build(
    captured: Captured,
    *,
    builder: BuilderName,
    status: SessionStatus,
    reward: float | None,
    findings: tuple[Finding, ...] = (),
    policy: TrainingPolicy = PLAIN,
) -> Trajectory:
    """The traces of a session. Their arrays are read-only: traces of one chain share memory.

    Raises:
        CaptureError: the accounting identity does not hold, a call has other tokens than it sampled (T08), a log-probability
            is none (L02), a sampled token has no policy version (W01), the calls of a trace do not say how they were sampled
            or do not agree in it (L01), or the nodes are no tree that holds all calls.
        ValueError: the reward is no finite number.
    """
    if reward is not None and not np.isfinite(reward):
        raise ValueError(f"expected a finite reward, or None, got {reward}")
    tree = checked_tree(captured)
    excluded = excluded_calls(captured.calls, tree, policy)
    answers = trainable(captured.calls, tree, excluded)
    pieces = sorted(_pieces(chains(answers), builder, tree), key=lambda piece: piece.chain[0].order)
    total = sum(len(answer.node.ids) for answer in answers)
    homes = {answer: index for index, piece in enumerate(pieces) for answer in piece.chain}
    traces = tuple(_trace(piece, homes, tree, captured, reward, total) for piece in pieces)
    noted = tuple(finding for call in captured.calls for finding in call.findings)
    accounting = _account(captured.calls, traces, excluded, reward)
    return Trajectory(status, traces, accounting, builder, findings + noted, policy=policy)


def checked_tree(captured: Captured) -> TokenTree:
    """The token tree, with every place in it that a call names.

    Raises:
        CaptureError: there is no such tree.
    """
    try:
        tree = TokenTree(captured.nodes)
    except ValueError as error:
        raise _damaged(captured, str(error)) from None
    for call in captured.calls:
        if not _holds(tree, call.prompt):
            place = f"token {call.prompt.offset} of node {call.prompt.node}"
            raise _damaged(captured, f"the prompt of call {call.call_id} ends at {place}, and there is none")
        for number, choice in enumerate(call.choices):
            if choice.node is not None and (fault := _answer_fault(tree, choice.node, call, number)):
                raise _damaged(captured, f"call {call.call_id} has node {choice.node}, and {fault}")
    return tree


def _damaged(captured: Captured, what: str) -> CaptureError:
    session = captured.calls[0].session_id if captured.calls else "without calls"
    return CaptureError("tree", f"the token tree of session {session} is damaged: {what}; `polar audit` says what else is")


def _holds(tree: TokenTree, at: Position) -> bool:
    return ROOT <= at.node < len(tree.nodes) and 0 <= at.offset <= tree.end(at.node).offset


def _answer_fault(tree: TokenTree, node_id: int, call: Call, number: int) -> str:
    node = tree.nodes[node_id] if 0 <= node_id < len(tree.nodes) else None
    if node is None or node.kind != "sampled" or node.logprobs is None or len(node.logprobs) != len(node.ids):
        return "there is no such whole sampled node"
    if (node.call_id, node.choice) != (call.call_id, number):
        return f"it says that it is choice {node.choice} of call {node.call_id}"
    if odd := [name for name, rows in node.extras.items() if len(rows) != len(node.ids)]:
        return f"{odd[0]} is not told of each of its tokens"
    return "" if node.parent == call.prompt else "it does not begin where the prompt ends"


@dataclass(frozen=True)
class _Piece:
    """What becomes a trace: answers in a chain, and the ids of the path to the end of the last."""

    chain: list[Answer]
    ids: Int32Array


def _pieces(found: Sequence[list[Answer]], builder: BuilderName, tree: TokenTree) -> Iterator[_Piece]:
    """Whole chains, or each answer for itself; paths of a chain begin alike, so all are views of the longest."""
    for chain in found:
        whole = tree.path(tree.end(chain[-1].node.node_id))
        whole.setflags(write=False)
        for part in [chain] if builder == "prefix_merging" else [[answer] for answer in chain]:
            yield _Piece(part, whole[: tree.depth(tree.end(part[-1].node.node_id))])


def _trace(
    piece: _Piece, homes: Mapping[Answer, int], tree: TokenTree, captured: Captured, reward: float | None, total: int
) -> Trace:
    chain, first, last = piece.chain, piece.chain[0], piece.chain[-1]
    prompt_length = tree.depth(first.node.parent)
    mask, logprobs = _under_mask(chain, tree, prompt_length, len(piece.ids))
    trained = sum(len(answer.node.ids) for answer in chain)
    agreed = _agreed(chain)
    said, places = _said(chain, captured)
    return Trace(
        prompt_ids=piece.ids[:prompt_length],
        response_ids=piece.ids[prompt_length:],
        loss_mask=mask,
        response_logprobs=logprobs,
        policy_versions=_versions(chain),
        call_ids=tuple(answer.call.call_id for answer in chain),
        prompt_messages=tuple(captured.messages[digest] for digest in first.call.message_hashes),
        response_messages=said,
        tools=captured.tools[first.call.tools_hash],
        finish_reason=last.call.choices[last.node.choice].finish_reason,
        temperature=agreed.temperature,
        top_p=agreed.top_p,
        top_k=agreed.top_k,
        logprobs_mode=agreed.logprobs_mode,
        reward=reward,
        weight=trained / total if reward is not None else 0.0,
        branch=Branch(first.call.kind, homes[first.parent] if first.parent else None),
        answers=places,
    )


def _under_mask(chain: Sequence[Answer], tree: TokenTree, begin: int, end: int) -> tuple[UInt8Array, Float32Array]:
    """Mask and log-probabilities of tokens `begin` to `end` of the path to the chain's last answer."""
    mask, logprobs = np.zeros(end - begin, np.uint8), np.zeros(end - begin, np.float32)
    for answer in chain:
        assert answer.node.logprobs is not None
        start = tree.depth(answer.node.parent) - begin
        mask[start : start + len(answer.node.ids)] = 1
        logprobs[start : start + len(answer.node.ids)] = answer.node.logprobs
    return mask, logprobs


def _said(chain: Sequence[Answer], captured: Captured) -> tuple[tuple[Message, ...], tuple[int, ...]]:
    """The messages after the first prompt, and the places in them of what the chain's calls said.

    A history tells an answer in the harness's way (reasoning dropped, arguments spelled otherwise), but its tokens stand in
    the sequence as they were sampled; so that is how it is told here, under the ids that its tools answer to.
    """
    known = len(chain[0].call.message_hashes)
    said = [captured.messages[digest] for digest in chain[-1].call.message_hashes[known:]]
    places: list[int] = []
    for answer in chain[:-1]:
        place, sampled = len(answer.call.message_hashes) - known, _message(answer)
        told = said[place] if 0 <= place < len(said) else None
        if told is not None and told.role == "assistant" and len(told.tool_calls) == len(sampled.tool_calls):
            calls = tuple(
                structs.replace(call, id=sent.id) for call, sent in zip(sampled.tool_calls, told.tool_calls, strict=True)
            )
            said[place] = structs.replace(sampled, tool_calls=calls)
            places.append(place)
    return (*said, _message(chain[-1])), (*places, len(said))


def _message(answer: Answer) -> Message:
    return answer.call.choices[answer.node.choice].message


def _agreed(chain: Sequence[Answer]) -> Sampling:
    """How all answers of the chain were sampled. L01: a trace has one sampling, or a trainer could not know what it trains."""
    first, *others = (answer.call for answer in chain)
    agreed = sampling(first)
    for call in others:
        if (said := sampling(call)) != agreed:
            one, other = structs.asdict(agreed), structs.asdict(said)
            raise CaptureError("L01", f"of one trace, call {first.call_id} was sampled with {one}, {call.call_id} with {other}")
    return agreed


def _versions(chain: Sequence[Answer]) -> tuple[VersionSpan, ...]:
    """Spans over the chain's trained tokens, neighbours of one version joined."""
    return spans_of(np.concatenate([token_versions(answer) for answer in chain]))


def spans_of(versions: Int32Array) -> tuple[VersionSpan, ...]:
    """Spans of equal neighbours; `versions` int32[n]."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1)).tolist()
    return tuple(VersionSpan(start, end, int(versions[start])) for start, end in pairwise([*starts, len(versions)]))


def _account(
    calls: Sequence[Call], traces: Sequence[Trace], excluded: Mapping[str, ExcludedReason], reward: float | None
) -> Accounting:
    """Sampled, trained and excluded tokens, counted from different places so that the identity says something."""
    counts: dict[ExcludedReason, int] = {}
    for call in calls:
        if reason := excluded.get(call.call_id):
            counts[reason] = counts.get(reason, 0) + call.sampled
        elif call.tail:
            counts["stop_tail"] = counts.get("stop_tail", 0) + call.tail
    masked = sum(int(trace.loss_mask.sum()) for trace in traces)
    if reward is None and masked:
        counts["no_reward"] = masked
    accounting = Accounting(sum(call.sampled for call in calls), masked if reward is not None else 0, counts)
    if not accounting.holds:
        raise CaptureError("accounting", f"sampled {accounting.sampled} ≠ trained {accounting.trained} + {accounting.excluded}")
    return accounting
