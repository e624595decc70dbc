"""The token tree against a slow and obvious oracle: every node as the full list of ids that lead to its end."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.specs import Int32Array, VersionSpan
from polar.tokens.records import Node, Position
from polar.tokens.tree import EMPTY, TokenTree, common_prefix

Ids = list[int]
ids_of = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def array(ids: Sequence[int]) -> Int32Array:
    return np.asarray(ids, np.int32)


def sampled(tree: TokenTree, at: Position, ids: Sequence[int], call_id: str = "c") -> Node:
    versions = (VersionSpan(0, len(ids), 1),)
    return tree.add_sampled(at, array(ids), np.zeros(len(ids), np.float32), versions, call_id, 0)


@dataclass
class Oracle:
    """Each node's full ids and the depth at which its own begin; grown beside a tree."""

    full: list[Ids] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def path(self, at: Position) -> Ids:
        return self.full[at.node][: self.starts[at.node] + at.offset] if at.node >= 0 else []

    def add(self, node: Node) -> None:
        parent = self.path(node.parent)
        self.full.append(parent + node.ids.tolist())
        self.starts.append(len(parent))

    def passes(self, tree: TokenTree, node: int, at: Position) -> bool:
        """Whether the path to the end of `node` goes through `at`."""
        while node >= 0:
            if node == at.node:
                return True
            parent = tree.nodes[node].parent
            if parent.node == at.node and parent.offset < at.offset:
                return False
            node = parent.node
        return at == EMPTY

    def longest(self, tree: TokenTree, at: Position, ids: Ids) -> int:
        """How many of `ids` some path through `at` holds next."""
        depth = len(self.path(at))
        return max(
            (agreement(self.full[node][depth:], ids) for node in range(len(self.full)) if self.passes(tree, node, at)), default=0
        )


def agreement(one: Ids, other: Ids) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@st.composite
def grown(draw: st.DrawFn) -> tuple[TokenTree, Oracle, list[Position]]:
    """A tree of few symbols, so that equal siblings and branches in the middle of nodes abound; its oracle; its known places."""
    tree, oracle, places = TokenTree(), Oracle(), [EMPTY]
    for number in range(draw(st.integers(1, 12))):
        at, ids = draw(st.sampled_from(places)), draw(ids_of)
        known = len(tree.nodes)
        if draw(st.booleans()):
            place = tree.add_context(at, array(ids), f"c{number}")
        else:
            place = tree.end(sampled(tree, at, ids, f"c{number}").node_id)
        for node in tree.nodes[known:]:
            oracle.add(node)
        assert oracle.path(place) == oracle.path(at) + ids
        places.append(place)
    return tree, oracle, places


@given(grown())
def test_a_path_is_what_was_put_there(grown: tuple[TokenTree, Oracle, list[Position]]) -> None:
    tree, oracle, places = grown
    for place in places + [Position(node.node_id, offset) for node in tree.nodes for offset in range(len(node.ids) + 1)]:
        assert tree.path(place).tolist() == oracle.path(place)
        assert sum(stop for _, stop in tree.spans(place)) == len(oracle.path(place))
        assert all(stop > 0 for _, stop in tree.spans(place))
    assert tree.path(EMPTY).dtype == np.int32


@given(grown(), st.data())
def test_descending_follows_the_longest_agreement(grown: tuple[TokenTree, Oracle, list[Position]], data: st.DataObject) -> None:
    tree, oracle, places = grown
    at, ids = data.draw(st.sampled_from(places)), data.draw(st.lists(st.integers(0, 2), max_size=20))
    place, taken = tree.descend(at, array(ids))
    assert taken == oracle.longest(tree, at, ids)
    assert oracle.path(place) == oracle.path(at) + ids[:taken]


@given(grown(), st.data())
def test_a_context_is_added_only_as_far_as_it_is_new(
    grown: tuple[TokenTree, Oracle, list[Position]], data: st.DataObject
) -> None:
    tree, oracle, places = grown
    at, ids = data.draw(st.sampled_from(places)), data.draw(ids_of)
    held, nodes = oracle.longest(tree, at, ids), len(tree.nodes)
    place = tree.add_context(at, array(ids), "new")
    assert tree.path(place).tolist() == oracle.path(at) + ids
    assert sum(len(node.ids) for node in tree.nodes[nodes:]) == len(ids) - held
    assert tree.add_context(at, array(ids), "again") == place
    assert len(tree.nodes) - nodes == (held < len(ids))


@given(grown(), st.data())
def test_a_tree_rebuilt_from_its_nodes_is_the_same_tree(
    grown: tuple[TokenTree, Oracle, list[Position]], data: st.DataObject
) -> None:
    tree, _, places = grown
    rebuilt = TokenTree(tree.nodes)
    assert all(rebuilt.children(place) == tree.children(place) for place in places)
    at, ids = data.draw(st.sampled_from(places)), array(data.draw(ids_of))
    assert rebuilt.descend(at, ids) == tree.descend(at, ids)
    assert rebuilt.add_context(at, ids, "new") == tree.add_context(at, ids, "new")
    assert [node.parent for node in rebuilt.nodes] == [node.parent for node in tree.nodes]


calls_of = st.lists(st.tuples(ids_of, ids_of), min_size=1, max_size=7)


@given(calls_of, st.data())
def test_the_order_of_arrival_does_not_change_what_the_tree_says(calls: list[tuple[Ids, Ids]], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(calls))))
    said: dict[int, Ids] = {}
    tree = TokenTree()
    for number in order:
        prompt, reply = calls[number]
        at = tree.add_context(EMPTY, array(prompt), f"c{number}")
        node = sampled(tree, at, reply, f"c{number}")
        assert (node.call_id, node.ids.tolist()) == (f"c{number}", reply)
        said[number] = tree.path(tree.end(node.node_id)).tolist()
    assert said == {number: prompt + reply for number, (prompt, reply) in enumerate(calls)}
    prefixes = {tuple(prompt[:length]) for prompt, _ in calls for length in range(1, len(prompt) + 1)}
    assert sum(len(node.ids) for node in tree.nodes if node.kind == "context") <= len(prefixes)
    assert sum(len(node.ids) for node in tree.nodes if node.kind == "sampled") == sum(len(reply) for _, reply in calls)


def test_equal_samples_stay_siblings_and_the_oldest_is_followed() -> None:
    tree = TokenTree()
    prompt = tree.add_context(EMPTY, array([1, 2]), "c0")
    twins = [sampled(tree, prompt, [3, 4], f"c{number}") for number in range(3)]
    assert tree.children(prompt) == tuple(twins)
    assert tree.descend(EMPTY, array([1, 2, 3, 4, 5])) == (Position(twins[0].node_id, 2), 4)
    later = tree.add_context(Position(twins[2].node_id, 2), array([5]), "c3")
    assert tree.descend(EMPTY, array([1, 2, 3, 4, 5])) == (later, 5)


def test_a_sample_that_says_what_a_context_says_is_a_node_of_its_own() -> None:
    tree = TokenTree()
    prompt = tree.add_context(EMPTY, array([1, 2]), "c0")
    continued = tree.add_context(prompt, array([3, 4, 5]), "c1")
    reply = sampled(tree, prompt, [3, 4])
    assert tree.children(prompt) == (tree.nodes[continued.node], reply)
    assert tree.descend(prompt, array([3, 4, 6])) == (Position(continued.node, 2), 2)
    assert tree.descend(Position(reply.node_id, 2), array([5])) == (Position(reply.node_id, 2), 0)


def test_a_branch_in_the_middle_of_a_node_leaves_the_node_whole() -> None:
    tree = TokenTree()
    whole = tree.add_context(EMPTY, array([1, 2, 3, 4]), "c0")
    branch = tree.add_context(EMPTY, array([1, 2, 9]), "c1")
    assert tree.nodes[branch.node].parent == Position(whole.node, 2)
    assert [node.ids.tolist() for node in tree.nodes] == [[1, 2, 3, 4], [9]]


def test_a_context_with_many_branches_is_searched_once() -> None:
    """Each branch used to double the search: forty of them would outlast the machine."""
    tree = TokenTree()
    shared = array(range(1000))
    tree.add_context(EMPTY, shared, "c0")
    for number in range(400):
        tree.add_context(EMPTY, np.append(shared[: 2 * number + 1], np.int32(-5)), f"c{number + 1}")
    assert tree.descend(EMPTY, shared) == (Position(0, 1000), 1000)


def test_nodes_and_what_they_were_made_from_do_not_share_memory() -> None:
    tree = TokenTree()
    ids, logprobs = array([1, 2, 3]), np.asarray([-1.0, -2.0, -3.0], np.float32)
    at = tree.add_context(EMPTY, ids, "c0")
    node = tree.add_sampled(at, ids, logprobs, (), "c0", 0)
    ids[:], logprobs[:] = 7, -7.0
    tree.path(at)[:] = 8
    assert node.logprobs is not None
    assert (tree.path(at).tolist(), node.ids.tolist(), node.logprobs.tolist()) == ([1, 2, 3], [1, 2, 3], [-1.0, -2.0, -3.0])
    for held in (tree.nodes[0].ids, node.ids, node.logprobs):
        with pytest.raises(ValueError, match="read-only"):
            held[0] = 9


def test_log_probabilities_keep_their_bits() -> None:
    values = np.asarray([-0.1, -1e-30, -0.0, -87.3], np.float32)
    node = TokenTree().add_sampled(EMPTY, array([1, 2, 3, 4]), values, (), "c0", 0)
    assert node.logprobs is not None
    assert node.logprobs.tobytes() == values.tobytes()


@pytest.mark.parametrize(("ids", "logprobs"), [([], []), ([1, 2], [-1.0])])
def test_a_sample_without_a_log_probability_for_each_id_is_refused(ids: Ids, logprobs: list[float]) -> None:
    with pytest.raises(ValueError, match=r"\d sampled ids with \d log-probabilities"):
        TokenTree().add_sampled(EMPTY, array(ids), np.asarray(logprobs, np.float32), (), "c0", 0)


@pytest.mark.parametrize(
    ("node_id", "parent", "says"),
    [
        (2, Position(0, 1), "comes at place 1"),
        (1, Position(1, 0), "node 1 under 1"),
        (1, Position(-2, 0), "node 1 under -2"),
        (1, Position(0, 4), "hangs at token 4 of node 0"),
        (1, Position(-1, 1), "hangs at token 1 of node -1"),
        (1, Position(0, -1), "hangs at token -1"),
    ],
)
def test_stored_nodes_that_are_no_tree_are_refused(node_id: int, parent: Position, says: str) -> None:
    first = Node(0, EMPTY, "context", array([1, 2, 3]), None, (), "c0")
    with pytest.raises(ValueError, match=says):
        TokenTree([first, Node(node_id, parent, "context", array([4]), None, (), "c1")])


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_the_common_prefix_is_counted(one: Ids, other: Ids) -> None:
    assert common_prefix(array(one), array(other)) == agreement(one, other)
