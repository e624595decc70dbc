"""Which places of a token tree later prompts go through, found in one pass from the leaves to the root.

A prompt is a path, and a path that has a token has all that is before it. So what a prompt holds need not be compared id by
id: it is enough to know how far down any prompt begins below a place. Parents come before their children, so one pass over
the nodes from the last to the first sees everything below a node before the node itself.
"""

from collections.abc import Sequence

from polar.audit.ground import Ground
from polar.specs import CallKind
from polar.tokens.records import ROOT, Call, Position

NEVER = -1  # before the first call


class Passages:
    """The prompts of a session by the places that they reach. The tree must be well-formed."""

    def __init__(self, calls: Sequence[Call], ground: Ground) -> None:
        self._ground = ground
        # By node: how many of its tokens a prompt has that ends in it or goes on from it, whose kind and ordinal.
        self._reached: list[dict[tuple[int, CallKind], int]] = [{} for _ in ground.nodes]
        for call in calls:
            self._note(call.prompt, call.kind, call.ordinal)
        for node in reversed(ground.nodes):
            latest: dict[CallKind, int] = {}
            for (_, kind), ordinal in self._reached[node.node_id].items():
                latest[kind] = max(latest.get(kind, NEVER), ordinal)
            for kind, ordinal in latest.items():
                self._note(node.parent, kind, ordinal)

    def last_with(self, node_id: int) -> int:
        """Ordinal of the last call whose prompt has all tokens of a node, or `NEVER`."""
        whole = len(self._ground.nodes[node_id].ids)
        return max((ordinal for (tokens, _), ordinal in self._reached[node_id].items() if tokens == whole), default=NEVER)

    def last_beyond(self, at: Position, kind: CallKind, calls: Sequence[Call]) -> int:
        """Ordinal of the last call of `kind` whose prompt begins with the path to `at`, or `NEVER`."""
        at = self._inside(at)
        if at.node == ROOT:
            return max((call.ordinal for call in calls if call.kind == kind), default=NEVER)
        reached = self._reached[at.node].items()
        return max((ordinal for (tokens, of), ordinal in reached if of == kind and tokens >= at.offset), default=NEVER)

    def _note(self, at: Position, kind: CallKind, ordinal: int) -> None:
        at = self._inside(at)
        if at.node != ROOT:
            reached = self._reached[at.node]
            reached[at.offset, kind] = max(reached.get((at.offset, kind), NEVER), ordinal)

    def _inside(self, at: Position) -> Position:
        """The same place, named by the node that has its last token."""
        while at.node != ROOT and at.offset == 0:
            at = self._ground.nodes[at.node].parent
        return at
