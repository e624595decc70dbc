"""What a forest says, written out: the sequences from its roots to its leaves."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from polar.trajectory.forest import NONE, Forest


@dataclass(frozen=True)
class Sequence:
    """One sequence, with what its own trace trains of it; lists of equal length, and the (call, choice) of its nodes."""

    session_id: str
    trace: int
    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    weight: float
    answers: list[tuple[str, int]]


def above(forest: Forest, node: int) -> list[int]:
    """The nodes from a root to `node`."""
    path = [node]
    while (parent := int(forest.parents[path[-1]])) != NONE:
        path.append(parent)
    return path[::-1]


def leaves(forest: Forest) -> list[int]:
    return sorted(set(range(len(forest.parents))) - set(forest.parents.tolist()))


def sequences(forest: Forest) -> Iterator[Sequence]:
    for leaf in leaves(forest):
        trace, session = int(forest.traces[leaf]), int(forest.sessions[leaf])
        path = above(forest, leaf)
        spans = [range(*forest.bounds[node : node + 2].tolist()) for node in path]
        own = [bool(forest.traces[node] == trace) for node in path]
        tokens = [(token, mine) for span, mine in zip(spans, own, strict=True) for token in span]
        assert [int(forest.positions[token]) for token, _ in tokens] == list(range(len(tokens)))
        yield Sequence(
            forest.session_ids[session],
            trace,
            [int(forest.ids[token]) for token, _ in tokens],
            [int(forest.loss_mask[token]) * mine for token, mine in tokens],
            [float(forest.logprobs[token]) * mine for token, mine in tokens],
            [int(forest.policy_versions[token]) if mine else NONE for token, mine in tokens],
            sum(float(forest.weights[node]) for node, mine in zip(path, own, strict=True) if mine),
            list(
                dict.fromkeys(
                    (forest.call_ids[node], int(forest.choices[node])) for node, mine in zip(path, own, strict=True) if mine
                )
            ),
        )


def check_shape(forest: Forest) -> None:
    """What the document of `Forest` promises of any."""
    nodes, tokens = len(forest.parents), len(forest.ids)
    assert len(forest.bounds) == nodes + 1
    assert forest.bounds[-1] == tokens
    assert (np.diff(forest.bounds) > 0).all(), "a node has at least one token"
    assert (forest.parents < np.arange(nodes)).all()
    for array in (forest.positions, forest.loss_mask, forest.logprobs, forest.policy_versions):
        assert len(array) == tokens
    for row in (
        forest.sampled,
        forest.traces,
        forest.weights,
        forest.samplings,
        forest.sessions,
        forest.choices,
        forest.call_ids,
    ):
        assert len(row) == nodes
    for node in range(nodes):
        inside = [other for other in range(nodes) if node in above(forest, other)]
        assert inside == list(range(node, node + len(inside))), "a subtree is one run"
    trained = np.repeat(forest.traces != NONE, np.diff(forest.bounds))
    assert (forest.loss_mask == trained).all()
    assert ((forest.policy_versions == NONE) == ~trained).all()
    assert not forest.logprobs[~trained].any()
    assert ((forest.samplings == NONE) == (forest.traces == NONE)).all()
    assert (forest.weights[forest.traces == NONE] == 0).all()
    assert all(forest.traces[leaf] != NONE for leaf in leaves(forest)), "every path leads to a trained token"
