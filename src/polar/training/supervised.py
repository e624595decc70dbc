"""Supervised fine-tuning on chats, through the trainer that reinforcement learning uses: the same trees, the same passes."""

import math
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
from msgspec import Struct

from polar.training.learner import Learner
from polar.trajectory.forest import Forest, join

Told = Callable[[int, dict[str, float]], bool]  # whether it is enough


class SftSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """How long, and how fast.

    Attributes:
        steps: optimiser steps.
        lr: at its highest, after `warmup_steps`; `decay` then takes it to a tenth, or leaves it.
    """

    steps: int
    lr: float
    warmup_steps: int = 0
    decay: Literal["none", "cosine"] = "cosine"


def rate(spec: SftSpec, step: int) -> float:
    """Learning rate of step 0, 1, …"""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.decay == "none":
        return spec.lr
    passed = (step - spec.warmup_steps) / max(1, spec.steps - spec.warmup_steps)
    return spec.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * passed)) / 2)


def supervise(learner: Learner, batches: Iterable[list[Forest]], spec: SftSpec, told: Told) -> None:
    """Train on batches until `spec.steps`, until there are none, or until `told` says that it is enough.

    Each learned token has the same weight in its batch.

    Raises:
        CaptureError: L02, loss or gradient is not finite.
    """
    for step, batch in zip(range(spec.steps), batches, strict=False):
        forest = join(batch)
        learned = int(forest.loss_mask.sum())
        weights = np.full(learned, 1 / learned, np.float32)
        metrics = learner.supervise(forest, weights, rate(spec, step))
        if told(step + 1, metrics | {"tokens_trained": float(learned), "tokens_computed": float(len(forest.ids))}):
            break


def held_out_loss(learner: Learner, batches: Iterable[list[Forest]]) -> float:
    """What `supervise` would lower, in nats a token, over batches that nothing is learned from."""
    summed, tokens = 0.0, 0
    for batch in batches:
        logprobs = learner.logprobs(join(batch))
        summed -= float(logprobs.sum(dtype=np.float64))
        tokens += len(logprobs)
    return summed / tokens
