"""What a training run is: the tables of its TOML file.

Every table has defaults that work; `polar train` says which file, table and key it cannot use.
"""

import tomllib
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from polar.errors import UsageError
from polar.specs import SamplingSpec, TrainingPolicy

Advantage = Literal["mean_std", "mean", "leave_one_out"]
Aggregation = Literal["session", "token"]
Schedule = Literal["sync", "one_step_off", "async"]
Publish = Literal["merged", "adapter"]


class ModelSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The policy and how it is computed.

    Attributes:
        path: `laptop`, `smollm2`, or a Hugging Face model directory.
        dtype: of the forward and backward pass; weights and optimiser are float32.
        lora_rank: 0 trains all weights.
        lora_alpha: LoRA's scale is `lora_alpha / lora_rank`.
        packing: `tree` computes what sequences share once; `traces` computes each sequence apart; `auto` takes `tree` where the
            model's layers allow it.
        max_tokens: tokens of one forward pass; a batch is cut into as many as it needs. A sequence that is longer goes alone.
        activation_checkpointing: compute activations anew in the backward pass, for memory.
    """

    path: str = "laptop"
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora_rank: int = 0
    lora_alpha: int = 16
    packing: Literal["auto", "tree", "traces"] = "auto"
    max_tokens: int = 16_384
    activation_checkpointing: bool = False


class TasksSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """What is trained on.

    Attributes:
        sources: as `polar run` takes them; paths are relative to the configuration file.
        harness: runs every task; "" leaves it to the tasks.
        seed: of the order in which tasks come; each pass over them has another.
        sampling: overrides that of the tasks where it is given.
    """

    sources: tuple[str, ...] = ("workspace:train:512",)
    harness: str = ""
    seed: int = 0
    sampling: SamplingSpec | None = None


class RolloutSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """How sessions are made.

    Attributes:
        engine, renderer: as in `polar run`.
        group_size: sessions of one task at a time (GRPO's group).
        groups: of a batch.
        schedule: `sync` makes a batch with the newest weights and trains on it; `one_step_off` makes the next while it trains;
            `async` never stops, and keeps what is at most `max_staleness` versions old.
        publish: `merged` gives the engine all weights, and running calls go on under them; `adapter` gives it the LoRA adapter
            alone, and running calls end under the one that they began with.
    """

    engine: str = "embedded"
    renderer: str = "auto"
    sandbox: Literal["auto", "process", "bubblewrap"] = "auto"
    concurrency: int = 8
    group_size: int = 8
    groups: int = 4
    schedule: Schedule = "sync"
    max_staleness: int = 2
    publish: Publish = "merged"
    policy: TrainingPolicy = TrainingPolicy()


class AlgorithmSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """GRPO and its variants; each is described, with its paper, where it is computed.

    Attributes:
        advantage: what a session's reward is held against.
        aggregation: `session` gives each session the same share of the loss, `token` each trained token.
        clip_low, clip_high: the ratio of new to old probability counts between `1 - clip_low` and `1 + clip_high`.
        kl: weight of the divergence (k3) from the model that training began with; 0 for none.
        importance_cap: truncated importance sampling between trainer and rollout: weights are at most this; 0 for none.
        minibatches: optimiser steps per batch.
        keep_uniform: also train groups in which all rewards are equal (their advantages are 0).
        min_usable: a group with fewer sessions that have a reward and trained tokens is left out.
        max_delta: a batch is refused when the mean |trainer - rollout| log-probability of tokens of the newest version is above.
        max_stale_delta: likewise for tokens of older versions.
    """

    advantage: Advantage = "mean_std"
    aggregation: Aggregation = "session"
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl: float = 0.0
    importance_cap: float = 2.0
    minibatches: int = 1
    keep_uniform: bool = False
    min_usable: int = 2
    max_delta: float = 0.05
    max_stale_delta: float = 1.0


class OptimizerSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """AdamW."""

    lr: float = 1e-5
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


class RunSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """How long, and what is kept.

    Attributes:
        steps: batches to train on.
        seed: of everything that the trainer draws.
        checkpoint_every: steps between checkpoints that can be resumed from; the last step always has one.
        keep: newest checkpoints that stay.
        log: where metrics go besides `metrics.jsonl`.
    """

    steps: int = 20
    seed: int = 0
    checkpoint_every: int = 5
    keep: int = 3
    log: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()


class TrainConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """All tables."""

    model: ModelSpec = ModelSpec()
    tasks: TasksSpec = TasksSpec()
    rollout: RolloutSpec = RolloutSpec()
    algorithm: AlgorithmSpec = AlgorithmSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    run: RunSpec = RunSpec()


def load_config(path: Path) -> TrainConfig:
    """Read a configuration.

    Raises:
        UsageError: with file, table and key.
    """
    try:
        config = msgspec.convert(tomllib.loads(path.read_text()), TrainConfig)
    except OSError as fault:
        raise UsageError(f"{path}: it cannot be read: {fault.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise UsageError(f"{path}: this is not TOML: {fault}") from None
    except msgspec.ValidationError as fault:
        raise UsageError(f"{path}: {fault}") from None
    if config.rollout.publish == "adapter" and not config.model.lora_rank:
        raise UsageError(f'{path}: publish = "adapter" in [rollout] needs a LoRA adapter: expected lora_rank above 0 in [model]')
    return config
