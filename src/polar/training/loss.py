"""GRPO's loss, as a sum over trained tokens, so that what several passes compute adds up to the batch's."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polar.training.config import AlgorithmSpec


@dataclass(frozen=True)
class TokenTerms:
    """What the loss takes of r trained tokens besides their log-probabilities; float32[r] each, without gradient.

    Attributes:
        old: log-probabilities under the trainer's weights before this batch changed them.
        rollout: the engine's, as sampled.
        advantages: of the tokens' sessions.
        weights: shares of the loss; over a batch they sum to 1.
        reference: log-probabilities under the model that training began with; None without a KL term.
    """

    old: Tensor
    rollout: Tensor
    advantages: Tensor
    weights: Tensor
    reference: Tensor | None = None


def policy_loss(logprobs: Tensor, terms: TokenTerms, spec: AlgorithmSpec) -> tuple[Tensor, dict[str, float]]:
    """The loss of r tokens (a scalar with gradient), and its metrics as weighted sums.

    Per token, with ratio ρ = exp(logprob - old), advantage A and weight w:

    - clipped surrogate (PPO, arXiv 1707.06347): -min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A), with the two bounds apart,
      "clip-higher" (DAPO, arXiv 2503.14476);
    - times min(exp(old - rollout), importance_cap), a constant: truncated importance sampling (IMPALA's ρ̄, arXiv 1802.01561)
      between the weights that sampled and those that train;
    - plus kl · (exp(reference - logprob) - (reference - logprob) - 1): the estimator k3 of KL(policy ‖ reference)
      (Schulman 2020, "Approximating KL divergence"; GRPO, arXiv 2402.03300).
    """
    ratio = (logprobs - terms.old).exp()
    clipped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    plain, bounded = ratio * terms.advantages, clipped * terms.advantages
    surrogate = -torch.minimum(plain, bounded)
    importance = (terms.old - terms.rollout).exp()
    capped = importance.clamp(max=spec.importance_cap) if spec.importance_cap else torch.ones_like(importance)
    total = capped * surrogate
    sums = {
        "ratio": ratio,
        "clip_share": (bounded < plain).float(),
        "importance": importance,
        "importance_capped": (importance > spec.importance_cap).float() if spec.importance_cap else torch.zeros_like(importance),
    }
    if terms.reference is not None:
        away = terms.reference - logprobs
        divergence = away.exp() - away - 1
        total = total + spec.kl * divergence
        sums["kl"] = divergence
    loss = (terms.weights * total).sum()
    metrics = {name: float((terms.weights * values.detach()).sum()) for name, values in sums.items()}
    return loss, {"loss": float(loss.detach()), **metrics}
