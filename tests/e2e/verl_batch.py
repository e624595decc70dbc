"""verl's own numbers of a stored run, computed where verl is installed: `python tests/e2e/verl_batch.py RUN GROUP OUT`.

OUT is a safetensors file. In it `old` and `new` log-probabilities stand for those of a trainer: importance and ratios leave their
bounds on both sides.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.config import ActorConfig

from polar.integrations.verl import data_proto, stored_groups

PAD = 256
ESTIMATORS: dict[str, tuple[str, dict[str, bool]]] = {
    "mean_std": ("grpo", {"norm_adv_by_std_in_grpo": True}),
    "mean": ("grpo", {"norm_adv_by_std_in_grpo": False}),
    "leave_one_out": ("rloo", {}),
}


def main(run: Path, group_size: int, out: Path) -> None:
    data = data_proto(stored_groups(run, group_size), pad_id=PAD, prompt_length=64, response_length=96)
    batch = data.batch
    found = {name: batch[name].clone() for name in batch.keys()}  # noqa: SIM118 (no mapping)
    mask = batch["response_mask"].bool()
    place = torch.arange(mask.shape[1], dtype=torch.float32)
    old = batch["rollout_log_probs"] + 0.9 * torch.sin(place) * mask
    new = old + 0.4 * torch.cos(2 * place) * mask
    found |= {"old": old, "new": new.clone()}
    batch["old_log_probs"] = old
    new.requires_grad_()
    for name, (estimator, options) in ESTIMATORS.items():
        found[f"advantages.{name}"], _ = get_adv_estimator_fn(estimator)(
            token_level_rewards=batch["rm_scores"],
            response_mask=batch["response_mask"],
            index=data.non_tensor_batch["uid"],
            **options,
        )
    corrected, _ = compute_rollout_correction_and_add_to_batch(
        data, RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0, rollout_rs=None)
    )
    for mode in ("seq-mean-token-mean", "token-mean"):
        config = ActorConfig(
            strategy="fsdp", rollout_n=group_size, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.28, loss_agg_mode=mode
        )
        loss, _ = get_policy_loss_fn("vanilla")(
            old_log_prob=old,
            log_prob=new,
            advantages=found["advantages.mean"],
            response_mask=corrected.batch["response_mask"],
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=corrected.batch["rollout_is_weights"],
        )
        (gradient,) = torch.autograd.grad(loss, new)
        found |= {f"loss.{mode}": loss.detach(), f"gradient.{mode}": gradient}
    names = data.non_tensor_batch
    metadata = {"session_id": ",".join(names["session_id"]), "uid": ",".join(names["uid"])}
    save_file({name: each.contiguous() for name, each in found.items()}, out, metadata)
    assert np.array_equal(names["__num_turns__"], np.full(len(mask), 2))
    assert data.meta_info["temperature"] == 1.0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
