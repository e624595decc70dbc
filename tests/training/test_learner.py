"""What changes weights, and what may not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from polar.errors import CaptureError, UsageError
from polar.training.batch import Batch
from polar.training.checkpoints import Checkpoints, Place
from polar.training.config import AlgorithmSpec, ModelSpec, OptimizerSpec, TrainConfig
from polar.training.learner import Learner
from polar.training.packing import layouts
from polar.training.policy import Policy, load_policy
from polar.training.schedule import Cursor
from polar.trajectory.chains import Sampling
from tests.training.forests import random_forest
from tests.training.models import tiny_dir

CONFIG = TrainConfig(model=ModelSpec(max_tokens=80), optimizer=OptimizerSpec(lr=1e-2, warmup_steps=2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dir(tmp_path_factory.mktemp("model"))


def learner(model: Path, config: TrainConfig = CONFIG) -> Learner:
    return Learner(load_policy(model, config.model), config)


@torch.no_grad()
def sampled(policy: Policy, seed: int, version: int = 0) -> Batch:
    """A batch whose log-probabilities are the policy's own."""
    forest = random_forest(seed)
    values = np.zeros(int(forest.loss_mask.sum()), np.float32)
    for layout in layouts(forest, 10_000, "traces"):
        values[layout.trained] = policy(layout).logprobs.numpy()
    logprobs = np.zeros(len(forest.ids), np.float32)
    logprobs[forest.loss_mask.astype(bool)] = values
    versions = np.where(forest.loss_mask, version, -1).astype(np.int32)
    return Batch(replace(forest, logprobs=logprobs, policy_versions=versions), np.asarray([1.0, -1.0, 0.5, -0.5]), version)


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in policy.named_parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_an_update_makes_what_was_good_likelier(model: Path) -> None:
    one = learner(model)
    batch = sampled(one.policy, 0)
    metrics = one.update(batch)
    assert metrics["delta"] < 1e-4
    assert metrics["grad_norm"] > 0
    gain = sampled(one.policy, 0).forest.logprobs - batch.forest.logprobs
    worth = batch.advantages[np.repeat(batch.forest.sessions, np.diff(batch.forest.bounds))]
    assert (gain * worth)[batch.forest.loss_mask.astype(bool)].sum() > 0


@pytest.mark.parametrize(
    ("code", "poison"),
    [
        ("L03", lambda batch: replace(batch.forest, ids=np.roll(batch.forest.ids, 1))),
        ("L03", lambda batch: replace(batch.forest, logprobs=batch.forest.logprobs * np.float32(0.5))),
        ("W01", lambda batch: replace(batch.forest, policy_versions=batch.forest.policy_versions + 1)),
        ("L01", lambda batch: replace(batch.forest, sampling=(Sampling(0.7, 1.0, 0, "raw"),))),
        ("L01", lambda batch: replace(batch.forest, sampling=(Sampling(1.0, 0.9, 0, "processed"),))),
        ("L01", lambda batch: replace(batch.forest, sampling=(Sampling(1.0, 1.0, 40, "processed"),))),
    ],
)
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_poisoned_batch_is_refused_and_changes_nothing(model: Path, code: str, poison: object, minibatches: int) -> None:
    config = structs.replace(CONFIG, algorithm=AlgorithmSpec(minibatches=minibatches))
    one, two = learner(model, config), learner(model, config)
    batch = sampled(one.policy, 0)
    before = weights(one.policy)
    with pytest.raises(CaptureError) as refusal:
        one.update(replace(batch, forest=poison(batch)))  # type: ignore[operator]
    assert refusal.value.code == code
    assert same(before, weights(one.policy))
    one.update(batch)
    two.update(batch)
    assert same(weights(one.policy), weights(two.policy)), "nothing of the refused batch is left in gradients either"


def test_weights_of_another_version_that_claim_to_be_the_newest_are_found_out(model: Path) -> None:
    one = learner(model)
    stale = sampled(one.policy, 1)
    one.update(sampled(one.policy, 0))
    forest = replace(stale.forest, policy_versions=np.where(stale.forest.loss_mask, 1, -1).astype(np.int32))
    with pytest.raises(CaptureError, match="L03"):
        one.update(Batch(forest, stale.advantages, 1))
    assert one.update(Batch(stale.forest, stale.advantages, 1))["staleness"] == 1


def test_processed_logprobs_of_another_temperature_are_reproduced(model: Path) -> None:
    one = learner(model)
    batch = sampled(one.policy, 0)
    (layout,) = layouts(batch.forest, 10_000, "tree")
    with torch.no_grad():
        heat = torch.full((len(layout.trained),), 0.5)
        values = one.policy(layout, heat).logprobs.numpy()
    logprobs = batch.forest.logprobs.copy()
    places = np.flatnonzero(batch.forest.loss_mask)[layout.trained]
    logprobs[places] = values
    forest = replace(batch.forest, logprobs=logprobs, sampling=(Sampling(0.5, 1.0, 0, "processed"),))
    assert one.update(replace(batch, forest=forest))["delta"] < 1e-4


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        structs.replace(CONFIG, algorithm=AlgorithmSpec(minibatches=2, kl=0.1)),
        structs.replace(CONFIG, model=ModelSpec(lora_rank=4, max_tokens=80)),
    ],
    ids=["plain", "minibatches and KL", "LoRA"],
)
def test_a_restored_learner_goes_on_bit_by_bit(tmp_path: Path, model: Path, config: TrainConfig) -> None:
    torch.manual_seed(0)
    straight = learner(model, config)
    for seed in range(2):
        straight.update(sampled(straight.policy, seed))
    Checkpoints(tmp_path, keep=2).write(straight, Place(2, Cursor(8)))
    later = [sampled(straight.policy, seed) for seed in (2, 3)]
    for batch in later:
        straight.update(replace(batch, version=3))
    torch.manual_seed(1)
    resumed = learner(model, config)
    assert Checkpoints(tmp_path, keep=2).restore(resumed) == Place(2, Cursor(8))
    for batch in later:
        resumed.update(replace(batch, version=3))
    assert resumed.steps == straight.steps
    assert same(weights(resumed.policy), weights(straight.policy))


def test_what_was_only_half_written_does_not_count_and_old_checkpoints_go(tmp_path: Path, model: Path) -> None:
    one = learner(model)
    kept = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        kept.write(one, Place(step))
    (tmp_path / ".checkpoint-half").mkdir()
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["000002", "000003"]
    assert kept.restore(one) == Place(3)
    assert Checkpoints(tmp_path / "new", keep=2).restore(one) == Place()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, model: Path) -> None:
    Checkpoints(tmp_path / "kept", keep=1).write(learner(model), Place(1))
    other = learner(tiny_dir(tmp_path / "model", hidden_size=64))
    with pytest.raises(UsageError, match="the weights of another model"):
        Checkpoints(tmp_path / "kept", keep=1).restore(other)


def test_supervision_learns_a_sequence(model: Path) -> None:
    one = learner(model)
    forest = random_forest(0)
    share = np.full(int(forest.loss_mask.sum()), 1 / forest.loss_mask.sum(), np.float32)
    losses = [one.supervise(forest, share, lr=0.02)["loss"] for _ in range(20)]
    assert losses[-1] < losses[0] / 2
