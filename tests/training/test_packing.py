"""What a batch of trees becomes: every trained token once, each after exactly what it was sampled after."""

from dataclasses import replace

import numpy as np
import pytest

from polar.errors import CaptureError
from polar.training.batch import Batch, Layout
from polar.training.packing import Packing, layouts, sequence_tokens, tokens
from tests.training.forests import random_forest
from tests.trajectory.forests import sequences

EVERYTHING = 1_000_000


def context(layout: Layout, token: int) -> list[int]:
    """Ids that the token attends, itself included, by the rule of `reach`."""
    before = np.arange(token + 1)
    return [int(each) for each in layout.ids[before[token < layout.reach[before]]]]


@pytest.mark.parametrize("packing", ["tree", "traces"])
@pytest.mark.parametrize("max_tokens", [1, 60, EVERYTHING])
@pytest.mark.parametrize("seed", range(4))
def test_every_trained_token_is_computed_once_after_its_own_context(packing: Packing, max_tokens: int, seed: int) -> None:
    forest = random_forest(seed)
    trained = np.flatnonzero(forest.loss_mask)
    wanted: dict[int, list[int]] = {}
    for sequence in sequences(forest):
        for place, mine in enumerate(sequence.mask):
            if mine:
                wanted[len(wanted)] = sequence.ids[: place + 1]
    seen: list[int] = []
    found: list[list[int]] = []
    for layout in layouts(forest, max_tokens, packing):
        for predictor, target, place in zip(layout.predictors, layout.targets, layout.trained, strict=True):
            seen.append(int(place))
            assert target == forest.ids[trained[place]]
            assert layout.positions[predictor] == forest.positions[trained[place]] - 1
            found.append([*context(layout, int(predictor)), int(target)])
    assert sorted(seen) == list(range(len(trained)))
    assert sorted(found) == sorted(wanted.values())


@pytest.mark.parametrize("seed", range(4))
def test_passes_keep_to_their_size_unless_a_sequence_is_longer(seed: int) -> None:
    forest = random_forest(seed, sessions=6)
    longest = int(forest.positions.max()) + 1
    for packing in ("tree", "traces"):
        sizes = [len(layout.ids) for layout in layouts(forest, 2 * longest, packing)]
        assert max(sizes) <= 2 * longest
        assert len(layouts(forest, EVERYTHING, packing)) == 1


def test_a_tree_computes_what_is_shared_once_and_traces_compute_it_each_time() -> None:
    forest = random_forest(2)
    (tree,) = layouts(forest, EVERYTHING, "tree")
    (apart,) = layouts(forest, EVERYTHING, "traces")
    assert len(tree.ids) == len(forest.ids)
    assert len(apart.ids) == sequence_tokens(forest)
    assert len(apart.ids) > 1.5 * len(tree.ids)


def test_each_session_has_the_same_share_of_the_loss_or_each_token() -> None:
    forest = random_forest(3)
    batch = Batch(forest, np.arange(4.0), 0)
    owners = np.repeat(forest.sessions, np.diff(forest.bounds))[forest.loss_mask.astype(bool)]
    by_session, by_token = tokens(batch, "session"), tokens(batch, "token")
    assert np.bincount(owners, by_session.weights) == pytest.approx([0.25] * 4)
    assert by_token.weights == pytest.approx(np.full(len(owners), 1 / len(owners)))
    assert by_session.advantages.tolist() == owners.tolist()


def test_a_trained_token_that_nothing_predicts_is_refused() -> None:
    forest = random_forest(0)
    mask = forest.loss_mask.copy()
    mask[0] = 1
    with pytest.raises(CaptureError, match="T08"):
        layouts(replace(forest, loss_mask=mask), EVERYTHING, "tree")
