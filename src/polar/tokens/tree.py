"""The token tree of one session: every token once, every call a path from the root.

Nodes are immutable and never split; a branch hangs at an offset inside the node that it leaves. A sampled node belongs to
one call and choice and is never merged with another, even where the ids are equal. The order in which calls arrive does
not change what the tree says: a context is found by its ids, wherever it lies.
"""

from collections.abc import Iterable

import numpy as np

from polar.specs import Float32Array, Int32Array, VersionSpan
from polar.tokens.records import ROOT, Node, Position

EMPTY = Position()


class TokenTree:
    """A growing tree; the one writer is the session's event loop."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        """Rebuild from stored nodes, in the order of their ids.

        Raises:
            ValueError: ids are not dense, or a node's parent is missing or too short.
        """
        self.nodes: list[Node] = []
        self._children: dict[Position, list[Node]] = {}
        self._offsets: dict[int, list[int]] = {}
        for node in nodes:
            if node.node_id != len(self.nodes) or not ROOT <= node.parent.node < node.node_id:
                raise ValueError(f"node {node.node_id} under {node.parent.node} comes at place {len(self.nodes)}")
            if not 0 <= node.parent.offset <= self.end(node.parent.node).offset:
                raise ValueError(f"node {node.node_id} hangs at token {node.parent.offset} of node {node.parent.node}")
            self._attach(node)

    def children(self, at: Position) -> tuple[Node, ...]:
        """Nodes that begin exactly at `at`."""
        return tuple(self._children.get(at, ()))

    def end(self, node_id: int) -> Position:
        """The place after a node's last token."""
        return Position(node_id, len(self.nodes[node_id].ids)) if node_id != ROOT else EMPTY

    def spans(self, at: Position) -> list[tuple[Node, int]]:
        """The path to `at`, root first: nodes, each with how many of its tokens are on the path."""
        spans: list[tuple[Node, int]] = []
        while at.node != ROOT:
            node = self.nodes[at.node]
            if at.offset > 0:
                spans.append((node, at.offset))
            at = node.parent
        spans.reverse()
        return spans

    def path(self, at: Position) -> Int32Array:
        """Ids of the path to `at`; int32[depth]."""
        parts = [node.ids[:stop] for node, stop in self.spans(at)]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def descend(self, at: Position, ids: Int32Array) -> tuple[Position, int]:
        """Follow `ids` from `at` as far as the tree holds them; the place reached and how many were followed.

        Where several nodes hold the same ids the oldest wins; the ids of the path are the same either way. Enters no node twice.
        """
        best = (at, 0)
        open_ends = [(at, 0)]
        while open_ends:
            start, taken = open_ends.pop()
            rest = ids[taken:]
            common = common_prefix(self.nodes[start.node].ids[start.offset :], rest) if start.node != ROOT else 0
            if taken + common > best[1]:
                best = (Position(start.node, start.offset + common), taken + common)
            open_ends += [
                (Position(child.node_id, 0), taken + child.parent.offset - start.offset)
                for child in self._branches(start, common, rest)
            ]
        return best

    def add_context(self, at: Position, ids: Int32Array, call_id: str) -> Position:
        """Make sure that `ids` lie below `at`, sharing what is there; the place after them."""
        place, taken = self.descend(at, ids)
        if taken == len(ids):
            return place
        node = Node(len(self.nodes), place, "context", _frozen(ids[taken:]), None, (), call_id)
        self._attach(node)
        return self.end(node.node_id)

    def add_sampled(
        self, at: Position, ids: Int32Array, logprobs: Float32Array, versions: tuple[VersionSpan, ...], call_id: str, choice: int
    ) -> Node:
        """Hang a call's sampled tokens at `at`; `ids` int32[n], `logprobs` float32[n], n ≥ 1."""
        if not len(ids) or len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} sampled ids with {len(logprobs)} log-probabilities")
        frozen_logprobs = logprobs.astype(np.float32, copy=True)
        frozen_logprobs.setflags(write=False)
        node = Node(len(self.nodes), at, "sampled", _frozen(ids), frozen_logprobs, versions, call_id, choice)
        self._attach(node)
        return node

    def _attach(self, node: Node) -> None:
        self.nodes.append(node)
        siblings = self._children.setdefault(node.parent, [])
        if not siblings:
            self._offsets.setdefault(node.parent.node, []).append(node.parent.offset)
        siblings.append(node)

    def _branches(self, start: Position, common: int, rest: Int32Array) -> list[Node]:
        """Nodes that leave the `common` tokens after `start` and agree with `rest`; newest first: the caller takes the last."""
        offsets = [offset for offset in self._offsets.get(start.node, ()) if 0 <= offset - start.offset <= common]
        agreeing = [
            child
            for offset in offsets
            if offset - start.offset < len(rest)
            for child in self._children[Position(start.node, offset)]
            if child.ids[0] == rest[offset - start.offset]
        ]
        return sorted(agreeing, key=lambda child: child.node_id, reverse=True)


def common_prefix(left: Int32Array, right: Int32Array) -> int:
    """Number of leading ids in which two arrays agree."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _frozen(ids: Int32Array) -> Int32Array:
    copy = ids.astype(np.int32, copy=True)
    copy.setflags(write=False)
    return copy
