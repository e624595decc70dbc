"""Proves one session from what is stored of it. Pure: it is handed the records, and gives back what does not hold."""

from polar.audit.calls import (
    check_lineage,
    check_messages,
    check_owners,
    check_prompts,
    check_replies,
    check_sampled,
    continues,
    has_spans,
    in_tree,
)
from polar.audit.ground import Ground, malformed
from polar.audit.proof import Proof
from polar.audit.traces import check_traces
from polar.specs import Finding, SessionResult
from polar.tokens.rendering import Renderer
from polar.trajectory.builders import Captured


def audit_session(captured: Captured, result: SessionResult | None, renderer: Renderer | None) -> list[Finding]:
    """The findings of `prove_session` alone."""
    return prove_session(captured, result, renderer).findings


def prove_session(captured: Captured, result: SessionResult | None, renderer: Renderer | None) -> Proof:
    """What does not hold of a session, and what was checked; `sampling`, `frozen` and `unreadable` are for the run to check.

    A tree that cannot be walked is the only finding then, for nothing else can be said.

    Args:
        result: what the ledger says of it; None if it says nothing, which is not held against the session here.
        renderer: what rendered the session's prompts; without it `T06` and `reply` are not checked.
    """
    if broken := malformed(captured.nodes) or _misplaced(captured):
        return Proof(broken, {"tree": len(captured.nodes)})
    ground, calls = Ground(captured.nodes), captured.calls
    findings = [
        *check_prompts(calls, ground),
        *check_lineage(calls, ground),
        *check_owners(calls, ground),
        *check_sampled(calls, ground, renderer),
        *check_replies(captured, ground, renderer),
        *check_messages(captured),
    ]
    if result is not None and result.calls != len(calls):
        findings.append(Finding("ledger", f"the ledger says {result.calls} calls, {len(calls)} are stored"))
    return Proof(findings, _checked(captured, renderer)) + check_traces(captured, ground, result)


def _checked(captured: Captured, renderer: Renderer | None) -> dict[str, int]:
    """What claims about calls and their spans were checked of, in a tree that can be walked."""
    calls, choices = captured.calls, [choice for call in captured.calls for choice in call.choices]
    by_id = {call.call_id: call for call in calls}
    spans = [len(node.ids) for node in captured.nodes if node.kind == "sampled"]
    answers = sum(choice.node is not None for choice in choices)
    in_place = dict.fromkeys(("prompt_hash", "prompt_tokens"), sum(map(in_tree, calls)))
    by_ids = {"T06": len(spans), "reply": answers} if renderer is not None else {}
    return {
        **in_place,
        "lineage": len(calls),
        **by_ids,
        "tree": len(captured.nodes),
        "T01": sum(continues(call, by_id) for call in calls),
        "T08": sum(map(has_spans, calls)),
        "owner": len(spans),
        "place": answers,
        "L02": sum(spans),
        "W01": sum(spans),
        "tool_call_id": sum(len(choice.message.tool_calls) for choice in choices),
        "message": len(captured.messages) + len(captured.tools),
    }


def _misplaced(captured: Captured) -> list[Finding]:
    """Findings `tree`: calls that name places or sampled spans which the tree does not have."""
    ground, found = Ground(captured.nodes), []
    for call in captured.calls:
        if not ground.has(call.prompt):
            place = f"token {call.prompt.offset} of node {call.prompt.node}"
            found.append(Finding("tree", f"the prompt ends at {place}, and there is none", call.call_id))
        for number, choice in enumerate(call.choices):
            if choice.node is not None and not ground.has_sampled(choice.node):
                said = f"choice {number} is node {choice.node}, and there is no such sampled node"
                found.append(Finding("tree", said, call.call_id))
    return found
