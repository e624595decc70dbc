"""A batch of trees cut into forward passes.

`tree` lays out whole trees, so that what sequences share is computed once. `traces` lays out each trace as a sequence of its
own. Both are the same `Layout`; in the second every node is a root.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from polar.errors import CaptureError
from polar.specs import Int32Array
from polar.training.batch import Batch, Int64Array, Layout, Tokens
from polar.training.config import Aggregation
from polar.trajectory.forest import NONE, Forest

Packing = Literal["tree", "traces"]


def tokens(batch: Batch, aggregation: Aggregation) -> Tokens:
    """The trained tokens of a batch with what the loss needs of each.

    `session` gives each session with a reward the same share of the loss, divided by the policy of its builder
    (`Forest.weights`); `token` gives each trained token of such a session the same.
    """
    forest = batch.forest
    mask = forest.loss_mask.astype(bool)
    lengths = np.diff(forest.bounds)
    session = np.repeat(forest.sessions, lengths)[mask]
    weights = np.repeat(forest.weights / np.maximum(lengths, 1), lengths)[mask]
    if aggregation == "token":
        weights = (weights > 0).astype(np.float64)
    total = weights.sum()
    advantages = np.nan_to_num(batch.advantages)[session] if len(session) else np.empty(0)
    return Tokens(
        ids=forest.ids[mask],
        advantages=advantages.astype(np.float32),
        weights=(weights / total if total else weights).astype(np.float32),
        logprobs=forest.logprobs[mask],
        versions=forest.policy_versions[mask],
    )


def layouts(forest: Forest, max_tokens: int, packing: Packing) -> list[Layout]:
    """Forward passes of at most `max_tokens` tokens; a sequence that is longer goes alone.

    Raises:
        CaptureError: a token is trained that has nothing before it.
    """
    places = np.cumsum(forest.loss_mask, dtype=np.int64) - 1  # of a trained token among the trained ones
    cut = _trees if packing == "tree" else _traces
    return list(cut(forest, places, max_tokens))


def _trees(forest: Forest, places: Int64Array, max_tokens: int) -> Iterator[Layout]:
    """Consecutive sequences together; what two passes share is trained in the first."""
    lengths, parents = np.diff(forest.bounds).tolist(), forest.parents.tolist()
    leaf = np.ones(len(parents), bool)
    leaf[forest.parents[forest.parents != NONE]] = False
    trained: set[int] = set()
    chosen: set[int] = set()
    size = 0
    for end in np.flatnonzero(leaf).tolist():
        fresh = list(_above(end, parents, chosen))
        added = sum(lengths[node] for node in fresh)
        if chosen and size + added > max_tokens:
            yield _tree(forest, places, sorted(chosen), trained)
            trained |= chosen
            fresh = list(_above(end, parents, set()))
            chosen, size, added = set(), 0, sum(lengths[node] for node in fresh)
        chosen.update(fresh)
        size += added
    if chosen:
        yield _tree(forest, places, sorted(chosen), trained)


def _above(node: int, parents: Sequence[int], known: set[int]) -> Iterator[int]:
    """The node, and those above it that are not `known`."""
    while node != NONE and node not in known:
        yield node
        node = parents[node]


def _tree(forest: Forest, places: Int64Array, nodes: list[int], trained: set[int]) -> Layout:
    at = {node: place for place, node in enumerate(nodes)}
    parents = np.asarray([at.get(int(forest.parents[node]), NONE) for node in nodes], np.int32)
    bounds = np.cumsum([0, *(np.diff(forest.bounds)[nodes])], dtype=np.int64)
    rows = _rows(forest, nodes)
    fresh = np.repeat([node not in trained for node in nodes], np.diff(bounds))
    return _layout(_Nodes(rows, forest.positions[rows].astype(np.int64), bounds, parents), forest, places, fresh)


def _traces(forest: Forest, places: Int64Array, max_tokens: int) -> Iterator[Layout]:
    """Each trace as one root; what it goes on from is trained in the trace that sampled it."""
    parents = forest.parents.tolist()
    ends = {
        (int(forest.sessions[node]), int(forest.traces[node])): node for node in np.flatnonzero(forest.traces != NONE).tolist()
    }
    held: list[tuple[Int64Array, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]] = []
    size = 0
    for (session, trace), end in ends.items():
        path = [*_above(end, parents, set())][::-1]
        rows = _rows(forest, path)
        own = [forest.sessions[node] == session and forest.traces[node] == trace for node in path]
        if held and size + len(rows) > max_tokens:
            yield _side_by_side(forest, places, held)
            held, size = [], 0
        held.append((rows, np.repeat(own, [forest.bounds[node + 1] - forest.bounds[node] for node in path])))
        size += len(rows)
    if held:
        yield _side_by_side(forest, places, held)


def _side_by_side(
    forest: Forest, places: Int64Array, held: Sequence[tuple[Int64Array, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]]
) -> Layout:
    bounds = np.cumsum([0, *(len(rows) for rows, _ in held)], dtype=np.int64)
    rows = np.concatenate([rows for rows, _ in held])
    positions = np.arange(len(rows)) - np.repeat(bounds[:-1], np.diff(bounds))
    nodes = _Nodes(rows, positions, bounds, np.full(len(held), NONE, np.int32))
    return _layout(nodes, forest, places, np.concatenate([own for _, own in held]))


@dataclass(frozen=True)
class _Nodes:
    """Nodes of a layout in the making; `rows` int64[n] are the places of its tokens in the forest."""

    rows: Int64Array
    positions: Int64Array
    bounds: Int64Array
    parents: Int32Array


def _rows(forest: Forest, nodes: Sequence[int]) -> Int64Array:
    return np.concatenate([np.arange(*forest.bounds[node : node + 2]) for node in nodes])


def _layout(nodes: _Nodes, forest: Forest, places: Int64Array, fresh: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Layout:
    before = np.arange(len(nodes.rows)) - 1
    ends = nodes.bounds[1:].copy()
    for node in range(len(nodes.parents) - 1, -1, -1):
        parent = nodes.parents[node]
        before[nodes.bounds[node]] = NONE if parent == NONE else nodes.bounds[parent + 1] - 1
        if parent != NONE:
            ends[parent] = max(ends[parent], ends[node])
    trained = np.flatnonzero(forest.loss_mask[nodes.rows].astype(bool) & fresh)
    if (before[trained] < 0).any():
        raise CaptureError("T08", "a trained token is the first of its sequence, so that nothing predicts it")
    return Layout(
        ids=forest.ids[nodes.rows].astype(np.int64),
        positions=nodes.positions.astype(np.int64),
        bounds=nodes.bounds,
        parents=nodes.parents,
        reach=np.repeat(ends, np.diff(nodes.bounds)),
        predictors=before[trained],
        targets=forest.ids[nodes.rows[trained]].astype(np.int64),
        trained=places[nodes.rows[trained]],
    )


def sequence_tokens(forest: Forest) -> int:
    """Tokens of all traces, each with all that it goes on from: what is computed where nothing is shared."""
    ends = {
        (int(forest.sessions[node]), int(forest.traces[node])): node for node in np.flatnonzero(forest.traces != NONE).tolist()
    }
    lengths = [int(forest.positions[forest.bounds[node + 1] - 1]) + 1 for node in ends.values()]
    return sum(lengths)
