"""A learner's life, of one process or of several: `torchrun … -m tests.training.together MODEL OUT [die]`."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from msgspec import structs

from polar.errors import CaptureError
from polar.training.batch import Batch
from polar.training.config import AlgorithmSpec, ModelSpec, OptimizerSpec, TrainConfig
from polar.training.distributed import Ranks, joined
from polar.training.leader import Leader, follow
from polar.training.learner import Learner
from polar.training.policy import load_policy
from tests.training.forests import random_forest

BASE = TrainConfig(
    model=ModelSpec(max_tokens=80),
    algorithm=AlgorithmSpec(max_delta=100, max_stale_delta=100),
    optimizer=OptimizerSpec(lr=1e-2, eps=1e-3),
)
OFTEN = structs.replace(BASE.algorithm, minibatches=2, kl=0.1)
KINDS = {
    "plain": BASE,
    "steps": structs.replace(BASE, algorithm=OFTEN),
    "lora": structs.replace(BASE, model=ModelSpec(max_tokens=80, lora_rank=4), algorithm=OFTEN),
    "traces": structs.replace(BASE, model=ModelSpec(max_tokens=80, packing="traces", activation_checkpointing=True)),
}


def batch(seed: int) -> Batch:
    return Batch(random_forest(seed), np.asarray([1.0, -1.0, 0.5, -0.5]), 0)


def live(learner: Learner, out: Path) -> None:
    """Updates, a refusal, a checkpoint, the same update before and after going back to it, and a model."""
    metrics = [learner.update(batch(0))]
    forest = batch(1).forest
    try:
        learner.update(replace(batch(1), forest=replace(forest, logprobs=forest.logprobs - 1000)))
    except CaptureError as refusal:
        metrics.append({refusal.code: 1.0})
    for name in ("half", "end", "again"):
        (out / name).mkdir(parents=True)
    learner.save(out / "half")
    metrics.append(learner.update(batch(1)))
    learner.save(out / "end")
    learner.export(out / "model")
    learner.restore(out / "half")
    learner.update(batch(1))
    learner.save(out / "again")
    (out / "metrics.json").write_text(json.dumps(metrics))


def made(model: Path, kind: str, ranks: Ranks | None = None) -> Learner:
    torch.manual_seed(0)
    policy = load_policy(model, KINDS[kind].model)
    if ranks is None:
        return Learner(policy, KINDS[kind])
    return (Leader if ranks.main else Learner)(policy, KINDS[kind], ranks)


def main(model: Path, out: Path, die: str = "") -> None:
    torch.set_num_threads(1)
    with joined() as ranks:
        for kind in KINDS:
            learner = made(model, kind, ranks)
            if die and not ranks.main:
                os.kill(os.getpid(), signal.SIGKILL)
            if isinstance(learner, Leader):
                live(learner, out / kind)
                learner.dismiss()
            else:
                follow(learner, ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
