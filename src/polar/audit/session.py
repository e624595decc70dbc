"""Proves one session from what is stored of it. Pure: it is handed the records, and gives back what does not hold."""

from polar.audit.calls import check_lineage, check_messages, check_owners, check_prompts, check_replies, check_sampled
from polar.audit.ground import Ground, malformed
from polar.audit.traces import check_traces
from polar.specs import Finding, SessionResult
from polar.tokens.rendering import Renderer
from polar.trajectory.builders import Captured


def audit_session(captured: Captured, result: SessionResult | None, renderer: Renderer | None) -> list[Finding]:
    """What does not hold of a session; empty means that all of `CLAIMS` is proven for it.

    A tree that cannot be walked is the only finding then, for nothing else can be said.

    Args:
        result: what the ledger says of it; None if it says nothing, which is not held against the session here.
        renderer: of the session's model; without one `T06` and `reply` are not checked.
    """
    findings = malformed(captured.nodes) or _misplaced(captured)
    if findings:
        return findings
    ground, calls = Ground(captured.nodes), captured.calls
    findings += check_prompts(calls, ground)
    findings += check_lineage(calls, ground)
    findings += check_owners(calls, ground)
    findings += check_sampled(calls, ground, renderer)
    findings += check_replies(calls, ground, renderer)
    findings += check_messages(captured)
    findings += check_traces(captured, ground, result)
    if result is not None and result.calls != len(calls):
        findings.append(Finding("ledger", f"the ledger says {result.calls} calls, {len(calls)} are stored"))
    return findings


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
