"""Token trees for training: what the sessions of a batch have in common once, and nothing that leads to no trained token.

A sequence of the batch is the path from a root to a leaf. A node's tokens come after those of its parent, which is always a
whole node: nodes of the token tree are cut where something leaves them. The token before a node's first is its parent's last.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from polar.specs import Extras, Float32Array, Int32Array, TrainingPolicy, UInt8Array
from polar.tokens.records import ROOT, Node
from polar.tokens.tree import TokenTree, common_prefix
from polar.trajectory.builders import Captured, checked_tree
from polar.trajectory.chains import Answer, Sampling, chains, sampling, token_versions, trainable
from polar.trajectory.exclusion import PLAIN, excluded_calls

Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]
Scalar = TypeVar("Scalar", bound=np.generic)
NONE = -1  # no parent, no trace, no version, no sampling


@dataclass(frozen=True)
class Forest:
    """Trees of n tokens in m nodes, of s sessions. Nodes are in the order of a walk: each subtree is one run, its root first.

    Attributes:
        ids: int32[n].
        positions: int32[n], tokens before this one in its sequence.
        loss_mask: uint8[n], 1 where the token is trained.
        logprobs: float32[n], the engine's where `loss_mask` is 1, else 0.
        policy_versions: int32[n], -1 where `loss_mask` is 0.
        bounds: int64[m + 1]; node i has the tokens from `bounds[i]` to `bounds[i + 1]`.
        parents: int32[m], -1 for a root.
        sampled: uint8[m], 1 where a policy spoke, trained or not.
        traces: int32[m], the trace of `prefix_merging` that trains the node, -1 where it is not trained.
        weights: float64[m], the node's share of its session's loss; those of a session sum to 1 (0 without a reward).
        samplings: int32[m], place in `sampling`; -1 where the node is not trained.
        sessions: int32[m], place in `session_ids`; context that sessions share has the first that brought it.
        call_ids: m calls that sampled or brought the nodes; `choices` int32[m] is which answer of the call it is.
        sampling: how trained tokens were sampled.
        session_ids, rewards: s names, and float64[s] with NaN for none.
        extras: what engines told besides, by name, [t, …] for the t trained tokens in their order; -1 (of floats NaN) stands for
            what was not told of a token. A name that no token has is not there.
    """

    ids: Int32Array
    positions: Int32Array
    loss_mask: UInt8Array
    logprobs: Float32Array
    policy_versions: Int32Array
    bounds: Int64Array
    parents: Int32Array
    sampled: UInt8Array
    traces: Int32Array
    weights: Float64Array
    samplings: Int32Array
    sessions: Int32Array
    choices: Int32Array
    call_ids: tuple[str, ...]
    sampling: tuple[Sampling, ...]
    session_ids: tuple[str, ...]
    rewards: Float64Array
    extras: Extras = field(default_factory=dict)


@dataclass(eq=False)
class _Piece:
    """A node in the making. Of context, `logprobs` and `versions` are None."""

    ids: Int32Array
    call_id: str
    choice: int
    sampled: bool
    session: int
    trace: int = NONE
    weight: float = 0.0
    sampling: Sampling | None = None
    logprobs: Float32Array | None = None
    versions: Int32Array | None = None
    extras: Extras = field(default_factory=dict)
    children: "list[_Piece]" = field(default_factory=list)


def forest(captured: Captured, *, reward: float | None, policy: TrainingPolicy = PLAIN) -> Forest:
    """The trainable tree of a session.

    Raises:
        CaptureError: as `builders.build`, but answers in one path may be sampled differently.
        ValueError: the reward is no finite number.
    """
    if reward is not None and not np.isfinite(reward):
        raise ValueError(f"expected a finite reward, or None, got {reward}")
    tree = checked_tree(captured)
    answers = trainable(captured.calls, tree, excluded_calls(captured.calls, tree, policy))
    homes = {answer: index for index, chain in enumerate(chains(answers)) for answer in chain}
    total = sum(len(answer.node.ids) for answer in answers) if reward is not None else 0
    roots = _grow(tree, {answer.node.node_id: answer for answer in answers}, homes, total)
    session_ids = (captured.calls[0].session_id,) if captured.calls else ()
    return _laid_out(roots, session_ids, [np.nan if reward is None else reward] * len(session_ids))


def join(forests: Sequence[Forest]) -> Forest:
    """One forest of all sessions, in which context that begins alike is there once. What was sampled is never shared."""
    roots: list[_Piece] = []
    session_ids: list[str] = []
    for one in forests:
        _graft(roots, _pieces(one, len(session_ids)))
        session_ids += one.session_ids
    return _laid_out(roots, tuple(session_ids), [reward for one in forests for reward in one.rewards.tolist()])


def _grow(tree: TokenTree, answers: Mapping[int, Answer], homes: Mapping[Answer, int], total: int) -> list[_Piece]:
    """Pieces of the tree, cut where something needed leaves a node; the roots."""
    cuts: list[set[int]] = [{len(node.ids)} if node.node_id in answers else set() for node in tree.nodes]
    for node in reversed(tree.nodes):  # a parent comes before its children
        at = tree.inner(node.parent)
        if cuts[node.node_id] and at.node != ROOT:
            cuts[at.node].add(at.offset)
    roots: list[_Piece] = []
    ends: dict[tuple[int, int], _Piece] = {}
    for node in tree.nodes:
        at = tree.inner(node.parent)
        siblings = ends[at.node, at.offset].children if cuts[node.node_id] and at.node != ROOT else roots
        answer = answers.get(node.node_id)
        whole = _trained(answer, homes[answer], total) if answer else _context(node)
        reached = 0
        for cut in sorted(cuts[node.node_id]):
            piece = _part(whole, reached, cut)
            siblings.append(piece)
            ends[node.node_id, cut] = piece
            siblings, reached = piece.children, cut
    return roots


def _context(node: Node) -> _Piece:
    return _Piece(node.ids, node.call_id, node.choice, node.kind == "sampled", 0)


def _trained(answer: Answer, trace: int, total: int) -> _Piece:
    node = answer.node
    weight = len(node.ids) / total if total else 0.0
    how, versions = sampling(answer.call), token_versions(answer)
    return _Piece(node.ids, node.call_id, node.choice, True, 0, trace, weight, how, node.logprobs, versions, node.extras)


def _part(whole: _Piece, start: int, end: int) -> _Piece:
    """Tokens `start` to `end` of a piece, without children."""
    return _Piece(
        whole.ids[start:end],
        whole.call_id,
        whole.choice,
        whole.sampled,
        whole.session,
        whole.trace,
        whole.weight * (end - start) / len(whole.ids),
        whole.sampling,
        None if whole.logprobs is None else whole.logprobs[start:end],
        None if whole.versions is None else whole.versions[start:end],
        {name: rows[start:end] for name, rows in whole.extras.items()} if whole.extras else {},
    )


def _graft(roots: list[_Piece], pieces: Sequence[_Piece]) -> None:
    """Put trees among `roots`, sharing context as far as it begins alike."""
    todo = [(roots, piece) for piece in reversed(pieces)]
    while todo:
        siblings, piece = todo.pop()
        alike = (one for one in siblings if not one.sampled and one.ids[0] == piece.ids[0])
        twin = None if piece.sampled else next(alike, None)
        if twin is None:
            siblings.append(piece)
            continue
        same = common_prefix(twin.ids, piece.ids)
        if same < len(twin.ids):
            _split(twin, same)
        if same < len(piece.ids):
            _split(piece, same)
        todo += [(twin.children, child) for child in reversed(piece.children)]


def _split(piece: _Piece, at: int) -> None:
    """Cut a piece of context in two: the first keeps its place, the second becomes its only child."""
    below = _part(piece, at, len(piece.ids))
    below.children, piece.children = piece.children, [below]
    piece.ids = piece.ids[:at]


def _pieces(one: Forest, first_session: int) -> list[_Piece]:
    """The trees of a forest taken apart; the roots."""
    made: list[_Piece] = []
    roots: list[_Piece] = []
    before = np.concatenate([[0], np.cumsum(one.loss_mask, dtype=np.int64)])  # trained tokens
    for node, parent in enumerate(one.parents.tolist()):
        start, end = one.bounds[node : node + 2].tolist()
        trained = one.traces[node] != NONE
        piece = _Piece(
            one.ids[start:end],
            one.call_ids[node],
            int(one.choices[node]),
            bool(one.sampled[node]),
            int(one.sessions[node]) + first_session,
            int(one.traces[node]),
            float(one.weights[node]),
            one.sampling[one.samplings[node]] if trained else None,
            one.logprobs[start:end] if trained else None,
            one.policy_versions[start:end] if trained else None,
            {name: rows[before[start] : before[end]] for name, rows in one.extras.items()} if trained else {},
        )
        (made[parent].children if parent != NONE else roots).append(piece)
        made.append(piece)
    return roots


def _walk(roots: Sequence[_Piece]) -> Iterator[tuple[_Piece, int, int]]:
    """Pieces with the number of their parent and the depth at which they begin, each subtree in one run."""
    todo = [(piece, NONE, 0) for piece in reversed(roots)]
    number = 0
    while todo:
        piece, parent, depth = todo.pop()
        yield piece, parent, depth
        todo += [(child, number, depth + len(piece.ids)) for child in reversed(piece.children)]
        number += 1


def _laid_out(roots: Sequence[_Piece], session_ids: tuple[str, ...], rewards: Sequence[float]) -> Forest:
    walk = list(_walk(roots))
    pieces = [piece for piece, _, _ in walk]
    lengths = [len(piece.ids) for piece in pieces]
    known = {piece.sampling: None for piece in pieces if piece.sampling}
    place = {how: number for number, how in enumerate(known)}
    trained = [piece.logprobs is not None for piece in pieces]
    return Forest(
        ids=joined([piece.ids for piece in pieces], np.int32),
        positions=joined([np.arange(depth, depth + len(piece.ids)) for piece, _, depth in walk], np.int32),
        loss_mask=np.repeat(np.asarray(trained, np.uint8), lengths),
        logprobs=joined([_or(piece.logprobs, piece, 0) for piece in pieces], np.float32),
        policy_versions=joined([_or(piece.versions, piece, NONE) for piece in pieces], np.int32),
        bounds=np.cumsum([0, *lengths], dtype=np.int64),
        parents=np.asarray([parent for _, parent, _ in walk], np.int32),
        sampled=np.asarray([piece.sampled for piece in pieces], np.uint8),
        traces=np.asarray([piece.trace for piece in pieces], np.int32),
        weights=np.asarray([piece.weight for piece in pieces], np.float64),
        samplings=np.asarray([place[piece.sampling] if piece.sampling else NONE for piece in pieces], np.int32),
        sessions=np.asarray([piece.session for piece in pieces], np.int32),
        choices=np.asarray([piece.choice for piece in pieces], np.int32),
        call_ids=tuple(piece.call_id for piece in pieces),
        sampling=tuple(known),
        session_ids=session_ids,
        rewards=np.asarray(rewards, np.float64),
        extras=stacked([(len(piece.ids), piece.extras) for piece in pieces if piece.logprobs is not None]),
    )


def _or(values: NDArray[np.generic] | None, piece: _Piece, fill: int) -> NDArray[np.generic]:
    return np.full(len(piece.ids), fill) if values is None else values


def stacked(parts: Sequence[tuple[int, Extras]]) -> Extras:
    """Extras of spans laid end to end, each with its number of tokens; see `Forest.extras`."""
    names = sorted({name for _, extras in parts for name in extras})
    return {name: _stacked([(length, extras.get(name)) for length, extras in parts]) for name in names} if names else {}


def _stacked(parts: Sequence[tuple[int, NDArray[np.generic] | None]]) -> NDArray[np.generic]:
    known = [rows for _, rows in parts if rows is not None]
    shape = np.max([rows.shape[1:] for rows in known], axis=0).tolist()
    kind = np.result_type(np.int8, *known)  # what holds -1 too
    whole = np.full((sum(length for length, _ in parts), *shape), np.nan if kind.kind == "f" else -1, kind)
    reached = 0
    for length, rows in parts:
        if rows is not None:
            whole[(slice(reached, reached + length), *map(slice, rows.shape[1:]))] = rows
        reached += length
    return whole


def joined(parts: Sequence[NDArray[np.generic]], dtype: type[Scalar]) -> NDArray[Scalar]:
    """Arrays laid end to end; none of them are an empty array."""
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
