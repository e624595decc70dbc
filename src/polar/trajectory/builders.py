"""Token tree to traces.

`per_request` makes a trace of every answer. `prefix_merging` makes a trace of every chain of answers in which each prompt
starts with the whole of what came before. Either way each trainable sampled token has mask 1 in exactly one trace, and
each sampled token that no trace trains is counted under a named reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import Struct, structs

from polar.chat import Message, Tool
from polar.errors import CaptureError
from polar.specs import Accounting, Branch, BuilderName, ExcludedReason, Finding, SessionStatus, Trace, Trajectory, VersionSpan
from polar.tokens.records import ROOT, Call, Node, Position
from polar.tokens.tree import TokenTree

RESULT_BUILDER: BuilderName = "prefix_merging"  # what a session's result counts


@dataclass(frozen=True)
class Captured:
    """All that was recorded of a session. `messages` and `tools` are the content-addressed tables, decoded."""

    calls: Sequence[Call]
    nodes: Sequence[Node]
    messages: Mapping[str, Message]
    tools: Mapping[str, tuple[Tool, ...]]


class _Sampling(Struct, frozen=True):
    """How the tokens of a call were sampled; `max_tokens` is no part of it, for it changes no probability."""

    temperature: float
    top_p: float
    top_k: int
    logprobs_mode: str


@dataclass(eq=False)
class _Answer:
    """One trainable sampled node in its chain."""

    node: Node
    call: Call
    parent: "_Answer | None" = None
    clean: bool = True
    followers: "list[_Answer]" = field(default_factory=list)
    below: int = 1

    @property
    def order(self) -> tuple[int, int]:
        return self.call.ordinal, self.node.choice


def build(
    captured: Captured, *, builder: BuilderName, status: SessionStatus, reward: float | None, findings: tuple[Finding, ...] = ()
) -> Trajectory:
    """The traces of a session.

    Raises:
        CaptureError: the accounting identity does not hold, a sampled token has no policy version (W01), the calls of a
            trace do not say how they were sampled or do not agree in it (L01), or the nodes are no tree that holds all calls.
        ValueError: the reward is no finite number.
    """
    if reward is not None and not np.isfinite(reward):
        raise ValueError(f"expected a finite reward, or None, got {reward}")
    tree = _tree(captured)
    excluded = excluded_calls(captured.calls, tree)
    answers = _answers(captured.calls, tree, excluded)
    chains = [[answer] for answer in answers] if builder == "per_request" else _chains(answers)
    total = sum(len(answer.node.ids) for answer in answers)
    homes = {answer: index for index, chain in enumerate(chains) for answer in chain}
    traces = tuple(_trace(chain, homes, tree, captured, reward, total) for chain in chains)
    noted = tuple(finding for call in captured.calls for finding in call.findings)
    return Trajectory(status, traces, _account(captured.calls, traces, excluded, reward), builder, findings + noted)


def _tree(captured: Captured) -> TokenTree:
    """The token tree, with every place in it that a call names."""
    try:
        tree = TokenTree(captured.nodes)
    except ValueError as error:
        raise _damaged(captured, str(error)) from None
    for call in captured.calls:
        if not _holds(tree, call.prompt):
            place = f"token {call.prompt.offset} of node {call.prompt.node}"
            raise _damaged(captured, f"the prompt of call {call.call_id} ends at {place}, and there is none")
        for choice in call.choices:
            if choice.node is not None and not _holds_answer(tree, choice.node):
                raise _damaged(captured, f"call {call.call_id} has node {choice.node}, and there is no such whole sampled node")
    return tree


def _damaged(captured: Captured, what: str) -> CaptureError:
    session = captured.calls[0].session_id if captured.calls else "without calls"
    return CaptureError("tree", f"the token tree of session {session} is damaged: {what}; `polar audit` says what else is")


def _holds(tree: TokenTree, at: Position) -> bool:
    return ROOT <= at.node < len(tree.nodes) and 0 <= at.offset <= tree.end(at.node).offset


def _holds_answer(tree: TokenTree, node_id: int) -> bool:
    if not 0 <= node_id < len(tree.nodes):
        return False
    node = tree.nodes[node_id]
    return node.kind == "sampled" and node.logprobs is not None and len(node.logprobs) == len(node.ids)


def excluded_calls(calls: Sequence[Call], tree: TokenTree) -> dict[str, ExcludedReason]:
    """Why each untrained call is not trained, by call id; a call that is not named is trained."""
    replaced = {call.replaces for call in calls if call.replaces} | _cut_and_asked_again(calls, tree)
    reasons: dict[str, ExcludedReason] = {}
    for call in calls:
        if call.status == "failed":
            reasons[call.call_id] = "untrusted"
        elif call.call_id in replaced:
            reasons[call.call_id] = "superseded"
        elif call.status == "aborted":
            reasons[call.call_id] = "aborted"
        elif call.kind == "auxiliary":
            reasons[call.call_id] = "auxiliary"
        elif call.constrained:
            reasons[call.call_id] = "constrained"
        elif not call.delivered and not _continued(call, calls, tree):
            reasons[call.call_id] = "undelivered"
    return reasons


def _continued(call: Call, calls: Sequence[Call], tree: TokenTree) -> bool:
    """A later prompt holds the whole answer, so it did arrive."""
    ends = {tree.end(choice.node) for choice in call.choices if choice.node is not None}
    later = (other for other in calls if other.ordinal > call.ordinal)
    return any(
        tree.end(node.node_id) in ends and stop == len(node.ids) for other in later for node, stop in tree.spans(other.prompt)
    )


def _cut_and_asked_again(calls: Sequence[Call], tree: TokenTree) -> set[str]:
    """C05: calls whose answer was cut by `length`, and which a later call asks again, or goes on from without the answer."""
    cut = {call.call_id for call in calls if _is_cut(call)}
    prompts = [(call, {node.node_id: stop for node, stop in tree.spans(call.prompt)}) for call in calls] if cut else []
    asked_again: set[str] = set()
    for call in calls:
        if call.call_id in cut:
            later = [(other, reached) for other, reached in prompts if other.ordinal > call.ordinal]
            nodes = [choice.node for choice in call.choices if choice.node is not None]  # of n answers one may be kept
            kept = any(reached.get(node) == len(tree.nodes[node].ids) for _, reached in later for node in nodes)
            if not kept and any(_asks_again(call, other, reached) for other, reached in later):
                asked_again.add(call.call_id)
    return asked_again


def _is_cut(call: Call) -> bool:
    return any(choice.finish_reason == "length" and choice.node is not None for choice in call.choices)


def _asks_again(call: Call, later: Call, reached: Mapping[int, int]) -> bool:
    """`later`, whose prompt goes through `reached` (node → tokens), holds the whole prompt of `call`, or all its messages."""
    if later.kind != call.kind:
        return False
    holds_messages = later.message_hashes[: len(call.message_hashes)] == call.message_hashes
    return holds_messages or reached.get(call.prompt.node, -1) >= call.prompt.offset


def _answers(calls: Sequence[Call], tree: TokenTree, excluded: Mapping[str, ExcludedReason]) -> list[_Answer]:
    """Trainable answers in order of their calls, each knowing the nearest trainable answer on its path."""
    by_node = {
        choice.node: _Answer(tree.nodes[choice.node], call)
        for call in calls
        if call.call_id not in excluded
        for choice in call.choices
        if choice.node is not None
    }
    for answer in by_node.values():
        _find_parent(answer, by_node, tree)
    ordered = sorted(by_node.values(), key=lambda answer: answer.node.node_id, reverse=True)
    for answer in ordered:
        if answer.parent is not None and answer.clean:
            answer.parent.below += answer.below
            answer.parent.followers.append(answer)
    return sorted(by_node.values(), key=lambda answer: answer.order)


def _find_parent(answer: _Answer, by_node: Mapping[int, _Answer], tree: TokenTree) -> None:
    """Walk up to the nearest trainable answer; `clean` says that all of it is on the path."""
    at = answer.node.parent
    while at.node >= 0:
        if at.node in by_node and at.offset > 0:
            answer.parent = by_node[at.node]
            answer.clean = at.offset == len(answer.parent.node.ids)
            return
        at = tree.nodes[at.node].parent


def _chains(answers: Sequence[_Answer]) -> list[list[_Answer]]:
    """Maximal chains; where several answers follow one, the one with the most below it goes on, then the earliest."""
    heirs = {
        answer: max(answer.followers, key=lambda follower: (follower.below, -follower.order[0], -follower.order[1]))
        for answer in answers
        if answer.followers
    }
    inherited = set(heirs.values())
    chains: list[list[_Answer]] = []
    for first in answers:
        if first not in inherited:
            chain = [first]
            while chain[-1] in heirs:
                chain.append(heirs[chain[-1]])
            chains.append(chain)
    return chains


def _trace(
    chain: list[_Answer], homes: Mapping[_Answer, int], tree: TokenTree, captured: Captured, reward: float | None, total: int
) -> Trace:
    first, last = chain[0], chain[-1]
    prompt_ids = tree.path(first.node.parent)
    whole = tree.path(tree.end(last.node.node_id))
    response_ids = whole[len(prompt_ids) :]
    mask = np.zeros(len(response_ids), np.uint8)
    logprobs = np.zeros(len(response_ids), np.float32)
    for start, answer in _starts(chain, tree, len(prompt_ids)):
        assert answer.node.logprobs is not None
        mask[start : start + len(answer.node.ids)] = 1
        logprobs[start : start + len(answer.node.ids)] = answer.node.logprobs
    trained = sum(len(answer.node.ids) for answer in chain)
    said = [captured.messages[digest] for digest in last.call.message_hashes[len(first.call.message_hashes) :]]
    answered = last.call.choices[last.node.choice]
    sampling = _sampling(chain)
    return Trace(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        loss_mask=mask,
        response_logprobs=logprobs,
        policy_versions=_versions(chain),
        call_ids=tuple(answer.call.call_id for answer in chain),
        prompt_messages=tuple(captured.messages[digest] for digest in first.call.message_hashes),
        response_messages=(*said, answered.message),
        tools=captured.tools[first.call.tools_hash],
        finish_reason=answered.finish_reason,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        logprobs_mode=sampling.logprobs_mode,
        reward=reward,
        weight=trained / total if reward is not None else 0.0,
        branch=Branch(first.call.kind, homes[first.parent] if first.parent else None),
    )


def _sampling(chain: Sequence[_Answer]) -> _Sampling:
    """How all answers of the chain were sampled. L01: a trace has one sampling, or a trainer could not know what it trains."""
    first, *others = (answer.call for answer in chain)
    sampling = _said(first)
    for call in others:
        if (said := _said(call)) != sampling:
            one, other = structs.asdict(sampling), structs.asdict(said)
            raise CaptureError("L01", f"of one trace, call {first.call_id} was sampled with {one}, {call.call_id} with {other}")
    return sampling


def _said(call: Call) -> _Sampling:
    try:
        temperature, top_p, top_k = (call.resolved[name] for name in ("temperature", "top_p", "top_k"))
    except KeyError as missing:
        raise CaptureError("L01", f"call {call.call_id} does not say with which {missing.args[0]} it was sampled") from None
    return _Sampling(temperature, top_p, int(top_k), call.logprobs_mode)


def _starts(chain: list[_Answer], tree: TokenTree, prompt_length: int) -> list[tuple[int, _Answer]]:
    """Where in the response each answer of the chain begins."""
    wanted = {answer.node.node_id: answer for answer in chain}
    starts: list[tuple[int, _Answer]] = []
    depth = -prompt_length
    for node, stop in tree.spans(tree.end(chain[-1].node.node_id)):
        if node.node_id in wanted:
            starts.append((depth, wanted[node.node_id]))
        depth += stop
    return starts


def _versions(chain: list[_Answer]) -> tuple[VersionSpan, ...]:
    """Spans over the chain's trained tokens, neighbours of one version joined."""
    spans: list[VersionSpan] = []
    base = 0
    for answer in chain:
        covered = 0
        for span in answer.node.versions:
            if span.start != covered or span.end <= span.start:
                raise CaptureError("W01", f"token {covered} of call {answer.call.call_id} has no policy version")
            covered = span.end
            start = base + span.start
            if spans and spans[-1].policy_version == span.policy_version:
                start = spans.pop().start
            spans.append(VersionSpan(start, base + span.end, span.policy_version))
        if covered != len(answer.node.ids):
            raise CaptureError("W01", f"versions of call {answer.call.call_id} end at token {covered} of {len(answer.node.ids)}")
        base += covered
    return tuple(spans)


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
