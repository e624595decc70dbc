"""Sessions to train on, of a shape that is asked for: the same tokens, laid out as one tree, or apart for each request."""

from dataclasses import dataclass

import numpy as np

from polar.trajectory.chains import Sampling
from polar.trajectory.forest import NONE, Forest

VOCABULARY = 4_096


@dataclass(frozen=True)
class Shape:
    """Groups of sessions, in tokens.

    Attributes:
        prompt: what all sessions share (system prompt and tools); `task` what those of a group do.
        calls: of a session; each samples `reply`, and the next hears `heard` (a tool's result) before it.
    """

    groups: int
    group_size: int
    prompt: int
    task: int
    calls: int
    reply: int
    heard: int


@dataclass(frozen=True)
class _Node:
    parent: int
    ids: tuple[int, ...]
    session: int
    trained: bool


def shared(shape: Shape) -> Forest:
    """All sessions as one forest: what they share is there once."""
    rng = np.random.default_rng(0)
    nodes = [_Node(NONE, _draw(rng, shape.prompt), 0, False)]
    for group in range(shape.groups):
        first = group * shape.group_size
        nodes.append(_Node(0, _draw(rng, shape.task), first, False))
        task = len(nodes) - 1
        for session in range(first, first + shape.group_size):
            parent = task
            for call in range(shape.calls):
                if call:
                    nodes.append(_Node(parent, _draw(rng, shape.heard), session, False))
                    parent = len(nodes) - 1
                nodes.append(_Node(parent, _draw(rng, shape.reply), session, True))
                parent = len(nodes) - 1
    return _forest(nodes, shape.groups * shape.group_size)


def per_request(whole: Forest) -> Forest:
    """Each request of `whole` apart: its prompt in full, and its reply."""
    nodes: list[_Node] = []
    for node in np.flatnonzero(whole.sampled).tolist():
        ids: tuple[int, ...] = ()
        at = int(whole.parents[node])
        while at != NONE:
            ids = (*_ids(whole, at), *ids)
            at = int(whole.parents[at])
        session = int(whole.sessions[node])
        nodes += [_Node(NONE, ids, session, False), _Node(len(nodes), _ids(whole, node), session, True)]
    return _forest(nodes, len(whole.session_ids))


def _draw(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, VOCABULARY, count).tolist())


def _ids(forest: Forest, node: int) -> tuple[int, ...]:
    return tuple(forest.ids[forest.bounds[node] : forest.bounds[node + 1]].tolist())


def _forest(nodes: list[_Node], sessions: int) -> Forest:
    lengths = np.asarray([len(node.ids) for node in nodes])
    bounds = np.cumsum([0, *lengths], dtype=np.int64)
    parents = np.asarray([node.parent for node in nodes], np.int32)
    depths = np.zeros(len(nodes), np.int64)  # tokens above a node
    traces = np.full(len(nodes), NONE, np.int32)
    leaves = 0
    for place, node in enumerate(nodes):
        if node.parent != NONE:
            depths[place] = depths[node.parent] + lengths[node.parent]
    trained = np.asarray([node.trained for node in nodes])
    for place in np.flatnonzero(trained).tolist():
        above = int(parents[place])
        while above != NONE and not trained[above]:
            above = int(parents[above])
        traces[place] = leaves if above == NONE else traces[above]
        leaves += int(above == NONE)
    owners = np.asarray([node.session for node in nodes], np.int32)
    mask = np.repeat(trained, lengths)
    share = np.bincount(owners[trained], lengths[trained], sessions)
    return Forest(
        ids=np.concatenate([np.asarray(node.ids, np.int32) for node in nodes]),
        positions=(np.repeat(depths, lengths) + np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)).astype(np.int32),
        loss_mask=mask.astype(np.uint8),
        logprobs=np.zeros(bounds[-1], np.float32),
        policy_versions=np.where(mask, 0, NONE).astype(np.int32),
        bounds=bounds,
        parents=parents,
        sampled=trained.astype(np.uint8),
        traces=traces,
        weights=np.where(trained, lengths / share[owners], 0.0),
        samplings=np.where(trained, 0, NONE).astype(np.int32),
        sessions=owners,
        choices=np.zeros(len(nodes), np.int32),
        call_ids=tuple(f"call-{place}" for place in range(len(nodes))),
        sampling=(Sampling(1.0, 1.0, 0, "raw"),),
        session_ids=tuple(f"session-{session}" for session in range(sessions)),
        rewards=(np.arange(sessions) % 2).astype(np.float64),
    )
