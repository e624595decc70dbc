"""Which calls of a session are not trained, and why. One pass over the tree says what later prompts hold, however many."""

from collections.abc import Sequence

from polar.specs import ExcludedReason, TrainingPolicy
from polar.tokens.records import ROOT, Call, Position
from polar.tokens.tree import TokenTree

PLAIN = TrainingPolicy()
NEVER = -1  # before the first call


class _Prompts:
    """The last call whose prompt goes through a place."""

    def __init__(self, calls: Sequence[Call], tree: TokenTree) -> None:
        self._tree = tree
        self._any = max((call.ordinal for call in calls), default=NEVER)
        # By node, and in it by how many of its tokens a prompt holds: the last ordinal.
        self._held: list[dict[int, int]] = [{} for _ in tree.nodes]
        for call in calls:
            self._note(call.prompt, call.ordinal)
        for node in reversed(tree.nodes):  # a parent comes before its children
            if held := self._held[node.node_id]:
                self._note(node.parent, max(held.values()))

    def last(self, at: Position) -> int:
        """Ordinal of the last call whose prompt begins with the path to `at`, or `NEVER`."""
        at = self._tree.inner(at)
        if at.node == ROOT:
            return self._any
        return max((ordinal for tokens, ordinal in self._held[at.node].items() if tokens >= at.offset), default=NEVER)

    def _note(self, at: Position, ordinal: int) -> None:
        at = self._tree.inner(at)
        if at.node != ROOT:
            held = self._held[at.node]
            held[at.offset] = max(held.get(at.offset, NEVER), ordinal)


def excluded_calls(calls: Sequence[Call], tree: TokenTree, policy: TrainingPolicy = PLAIN) -> dict[str, ExcludedReason]:
    """Why each untrained call is not trained, by call id; a call that is not named is trained."""
    prompts = _Prompts(calls, tree)
    arrived = {call.call_id for call in calls if _arrived(call, prompts, tree)}
    replaced = {call.replaces for call in calls} | _cut_and_asked_again(calls, tree, arrived)
    reasons: dict[str, ExcludedReason] = {}
    for call in calls:
        if call.untrained:  # whatever became of it: it is none of the policy's proven tokens
            reasons[call.call_id] = call.untrained
        elif call.status == "failed":
            reasons[call.call_id] = "untrusted"
        elif call.call_id in replaced and policy.superseded == "exclude":
            reasons[call.call_id] = "superseded"
        elif call.status == "aborted" and policy.aborted == "exclude":
            reasons[call.call_id] = "aborted"
        elif call.kind == "auxiliary" and policy.auxiliary == "exclude":
            reasons[call.call_id] = "auxiliary"
        elif call.constrained:
            reasons[call.call_id] = "constrained"
        elif _is_cut(call) and policy.truncated == "exclude":
            reasons[call.call_id] = "truncated"
        elif call.status == "ok" and not call.delivered and call.call_id not in arrived:
            reasons[call.call_id] = "undelivered"
    return reasons


def _arrived(call: Call, prompts: _Prompts, tree: TokenTree) -> bool:
    """A later prompt holds a whole answer, so it did arrive, and was kept."""
    return any(choice.node is not None and prompts.last(tree.end(choice.node)) > call.ordinal for choice in call.choices)


def _cut_and_asked_again(calls: Sequence[Call], tree: TokenTree, arrived: set[str]) -> set[str]:
    """C05: calls whose answer was cut by `length`, and which a later call asks again, or goes on from without the answer."""
    cut = [call for call in calls if _is_cut(call) and call.call_id not in arrived]
    asked_again: set[str] = set()
    for kind in {call.kind for call in cut}:
        alike = [call for call in calls if call.kind == kind]
        prompts = _Prompts(alike, tree)
        for call in cut:
            if call.kind == kind and (prompts.last(call.prompt) > call.ordinal or _said_again(call, alike)):
                asked_again.add(call.call_id)
    return asked_again


def _is_cut(call: Call) -> bool:
    return any(choice.finish_reason == "length" and choice.node is not None for choice in call.choices)


def _said_again(call: Call, alike: Sequence[Call]) -> bool:
    """A later call's messages begin with all of `call`. The last message is compared first: it tells most apart."""
    said, count = call.message_hashes, len(call.message_hashes)
    later = (other.message_hashes for other in alike if other.ordinal > call.ordinal)
    return any(other[count - 1 : count] == said[count - 1 :] and other[:count] == said for other in later)
