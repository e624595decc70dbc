"""The token tree of one session: every token once, every call a path from the root.

Nodes are immutable and never split; a branch hangs at an offset inside the node that it leaves. A sampled node belongs to
one call and choice and is never merged with another, even where the ids are equal. The order in which calls arrive does
not change what the tree says: a context is found by its ids, wherever it lies.
"""

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from polar.specs import NO_EXTRAS, Extras, Float32Array, Int32Array, VersionSpan
from polar.tokens.records import ROOT, Node, Position

EMPTY = Position()
Value = TypeVar("Value", bound=np.generic)


class TokenTree:
    """A growing tree; the one writer is the session's event loop."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        """Rebuild from stored nodes, in the order of their ids.

        Raises:
            ValueError: ids are not dense, a node's parent is missing or too short, or a node is empty.
        """
        self.nodes: list[Node] = []
        self._starts: list[int] = []  # depth at which each node begins
        self._children: dict[tuple[int, int], list[Node]] = {}  # by node and offset
        self._offsets: dict[int, list[int]] = {}  # at which a node is left
        for node in nodes:
            if node.node_id != len(self.nodes) or not ROOT <= node.parent.node < node.node_id:
                raise ValueError(f"node {node.node_id} under {node.parent.node} comes at place {len(self.nodes)}")
            if not 0 <= node.parent.offset <= self.end(node.parent.node).offset:
                raise ValueError(f"node {node.node_id} hangs at token {node.parent.offset} of node {node.parent.node}")
            if not len(node.ids):
                raise ValueError(f"node {node.node_id} has no tokens")
            self._attach(node)

    def children(self, at: Position) -> tuple[Node, ...]:
        """Nodes that begin exactly at `at`."""
        return tuple(self._children.get((at.node, at.offset), ()))

    def end(self, node_id: int) -> Position:
        """The place after a node's last token."""
        return Position(node_id, len(self.nodes[node_id].ids)) if node_id != ROOT else EMPTY

    def inner(self, at: Position) -> Position:
        """The same place, named by the node that holds the token before it."""
        while at.offset == 0 and at.node != ROOT:
            at = self.nodes[at.node].parent
        return at

    def depth(self, at: Position) -> int:
        """Tokens on the path to `at`."""
        return self._starts[at.node] + at.offset if at.node != ROOT else 0

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
        wanted = ids.tobytes()
        open_ends = [(at.node, at.offset, 0)]
        while open_ends:
            node, offset, taken = open_ends.pop()
            common = self._agreement(node, offset, ids, wanted, taken)
            if taken + common > best[1]:
                best = (Position(node, offset + common), taken + common)
            branches = [
                (child.node_id, 0, taken + left - offset)
                for left in self._offsets.get(node, ())
                if offset <= left <= offset + common and taken + left - offset < len(ids)
                for child in self._children[node, left]
                if child.ids[0] == ids[taken + left - offset]
            ]
            open_ends += sorted(branches, reverse=True)  # the oldest is taken first
        return best

    def add_context(self, at: Position, ids: Int32Array, call_id: str) -> Position:
        """Make sure that `ids` lie below `at`, sharing what is there; the place after them."""
        place, taken = self.descend(at, ids)
        if taken == len(ids):
            return place
        node = Node(len(self.nodes), place, "context", _frozen(ids[taken:].astype(np.int32, copy=False)), None, (), call_id)
        self._attach(node)
        return self.end(node.node_id)

    def add_sampled(
        self,
        at: Position,
        ids: Int32Array,
        logprobs: Float32Array,
        versions: tuple[VersionSpan, ...],
        call_id: str,
        choice: int,
        extras: Extras = NO_EXTRAS,
    ) -> Node:
        """Hang a call's sampled tokens at `at`; `ids` int32[n], `logprobs` float32[n], n ≥ 1, `extras` [n, …]."""
        if not len(ids) or any(len(rows) != len(ids) for rows in (logprobs, *extras.values())):
            others = ", ".join(f"{len(rows)} {name}" for name, rows in {"log-probabilities": logprobs, **extras}.items())
            raise ValueError(f"{len(ids)} sampled ids with {others}")
        ids, logprobs = ids.astype(np.int32, copy=False), logprobs.astype(np.float32, copy=False)
        kept = {name: _frozen(rows) for name, rows in extras.items()} if extras else NO_EXTRAS
        node = Node(len(self.nodes), at, "sampled", _frozen(ids), _frozen(logprobs), versions, call_id, choice, kept)
        self._attach(node)
        return node

    def _attach(self, node: Node) -> None:
        self._starts.append(self.depth(node.parent))
        self.nodes.append(node)
        siblings = self._children.setdefault((node.parent.node, node.parent.offset), [])
        if not siblings:
            self._offsets.setdefault(node.parent.node, []).append(node.parent.offset)
        siblings.append(node)

    def _agreement(self, node: int, offset: int, ids: Int32Array, wanted: bytes, taken: int) -> int:
        """How many of a node's ids from `offset` on are those of `ids` from `taken` on; `wanted` are the bytes of `ids`."""
        if node == ROOT:
            return 0
        held = self.nodes[node].ids[offset:] if offset else self.nodes[node].ids
        # Most often the whole node agrees, and bytes say so faster than arrays.
        return len(held) if wanted.startswith(held.tobytes(), 4 * taken) else common_prefix(held, ids[taken:])


def common_prefix(left: Int32Array, right: Int32Array) -> int:
    """Number of leading ids in which two arrays agree."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _frozen(values: NDArray[Value]) -> NDArray[Value]:
    copy = values.copy()
    copy.setflags(write=False)
    return copy
