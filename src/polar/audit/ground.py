"""The tokens of a session as one flat array, and paths as places in it.

The audit must not lean on what it audits, so it walks the tree by itself: every stored token gets a number, and a path is
the array of its tokens' numbers. Two paths share a token if they share its number, however equal the ids are.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polar.specs import Finding, Float32Array, Int32Array
from polar.tokens.records import ROOT, Node, Position

Numbers = NDArray[np.int64]
UNSAMPLED = -1  # the version of a context token


def malformed(nodes: Sequence[Node]) -> list[Finding]:
    """Findings `tree`: what keeps the tree from being walked."""
    return [
        Finding("tree", f"node {node.node_id}: {fault}", node.call_id)
        for place, node in enumerate(nodes)
        if (fault := _fault(place, node, nodes))
    ]


def _fault(place: int, node: Node, nodes: Sequence[Node]) -> str:
    parent = node.parent
    if node.node_id != place:
        return f"it comes where node {place} is expected"
    if not ROOT <= parent.node < place:
        return f"its parent {parent.node} does not come before it"
    length = 0 if parent.node == ROOT else len(nodes[parent.node].ids)
    if not 0 <= parent.offset <= length:
        return f"it begins at token {parent.offset} of node {parent.node}, which has {length}"
    if not len(node.ids):
        return "it has no tokens"
    if (node.kind == "sampled") != (node.logprobs is not None):
        return f"{node.kind}, {'without' if node.logprobs is None else 'with'} log-probabilities"
    return ""


class Ground:
    """All tokens of a well-formed tree, numbered from 0 in the order of nodes.

    Attributes:
        ids, logprobs, versions: of each token; NaN and `UNSAMPLED` for context, and where a node has too few.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self._parents = {node.parent.node for node in nodes if node.parent.offset}
        self._first = np.cumsum([0, *(len(node.ids) for node in nodes)], dtype=np.int64)
        total = int(self._first[-1])
        self.ids: Int32Array = np.zeros(total, np.int32)
        self.logprobs: Float32Array = np.full(total, np.nan, np.float32)
        self.versions: Int32Array = np.full(total, UNSAMPLED, np.int32)
        for node in nodes:
            self._lay(node)

    def tokens(self, node_id: int) -> Numbers:
        """Numbers of all tokens of a node."""
        return np.arange(self._first[node_id], self._first[node_id + 1])

    def continued(self, node_id: int) -> bool:
        """Whether another node begins in it."""
        return node_id in self._parents

    def has(self, at: Position) -> bool:
        """Whether there is such a place."""
        if at.node == ROOT:
            return at.offset == 0
        return 0 <= at.node < len(self.nodes) and 0 <= at.offset <= len(self.nodes[at.node].ids)

    def has_sampled(self, node_id: int) -> bool:
        """Whether there is such a node, and it was sampled."""
        return 0 <= node_id < len(self.nodes) and self.nodes[node_id].kind == "sampled"

    def path(self, at: Position) -> Numbers:
        """Numbers of the tokens from the root to `at`."""
        nodes, lengths = [], []
        while at.node != ROOT:
            nodes.append(at.node)
            lengths.append(at.offset)
            at = self.nodes[at.node].parent
        spans, counts = np.array(nodes[::-1], np.int64), np.array(lengths[::-1], np.int64)
        before = np.cumsum(counts) - counts  # tokens of the path before each span
        numbers: Numbers = np.arange(counts.sum()) + np.repeat(self._first[spans] - before, counts)
        return numbers

    def goes_through(self, at: Position, node_id: int) -> bool:
        """Whether the path to `at` has all tokens of a node."""
        while at.node > node_id:  # parents come before their children
            at = self.nodes[at.node].parent
        return at == Position(node_id, len(self.nodes[node_id].ids))

    def through(self, node_id: int) -> Numbers:
        """Numbers of the tokens from the root to a node's end."""
        return self.path(Position(node_id, len(self.nodes[node_id].ids)))

    def _lay(self, node: Node) -> None:
        start, length = int(self._first[node.node_id]), len(node.ids)
        self.ids[start : start + length] = node.ids
        if node.logprobs is not None:
            self.logprobs[start : start + min(length, len(node.logprobs))] = node.logprobs[:length]
        for span in node.versions:
            self.versions[start + max(span.start, 0) : start + min(span.end, length)] = span.policy_version
