"""The loss against its formula in plain Python, and its gradient against that formula's."""

import math

import pytest
import torch
from msgspec import structs

from polar.training.config import AlgorithmSpec
from polar.training.loss import TokenTerms, policy_loss

GRPO = AlgorithmSpec(clip_low=0.2, clip_high=0.28, importance_cap=2.0)
VARIANTS = [
    GRPO,
    structs.replace(GRPO, clip_low=0.1, clip_high=0.5),
    structs.replace(GRPO, importance_cap=0.0),
    structs.replace(GRPO, importance_cap=0.5),
    structs.replace(GRPO, kl=0.3),
]


def drawn(seed: int, kl: bool) -> tuple[torch.Tensor, TokenTerms]:
    """Tokens on both sides of every bound."""
    rng = torch.Generator().manual_seed(seed)
    old = -torch.rand(40, generator=rng, dtype=torch.float64) * 3
    near = [old + torch.randn(40, generator=rng, dtype=torch.float64) * spread for spread in (0.4, 0.5, 0.3)]
    weights = torch.rand(40, generator=rng, dtype=torch.float64)
    advantages = torch.randn(40, generator=rng, dtype=torch.float64)
    terms = TokenTerms(old, near[1], advantages, weights / weights.sum(), near[2] if kl else None)
    return near[0].requires_grad_(), terms


def by_hand(logprob: float, place: int, terms: TokenTerms, spec: AlgorithmSpec) -> float:
    """One token's term of the loss."""
    old, rollout, advantage = (float(each[place]) for each in (terms.old, terms.rollout, terms.advantages))
    ratio = math.exp(logprob - old)
    clipped = min(max(ratio, 1 - spec.clip_low), 1 + spec.clip_high)
    surrogate = -min(ratio * advantage, clipped * advantage)
    trust = min(math.exp(old - rollout), spec.importance_cap) if spec.importance_cap else 1.0
    away = float(terms.reference[place]) - logprob if terms.reference is not None else 0.0
    return float(terms.weights[place]) * (trust * surrogate + spec.kl * (math.exp(away) - away - 1))


@pytest.mark.parametrize("spec", VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_the_formula(spec: AlgorithmSpec, seed: int) -> None:
    logprobs, terms = drawn(seed, spec.kl > 0)
    loss, metrics = policy_loss(logprobs, terms, spec)
    loss.backward()  # type: ignore[no-untyped-call]
    values = logprobs.tolist()
    assert float(loss) == pytest.approx(sum(by_hand(value, place, terms, spec) for place, value in enumerate(values)))
    assert metrics["loss"] == float(loss)
    assert logprobs.grad is not None
    for place, value in enumerate(values):
        slope = (by_hand(value + 1e-6, place, terms, spec) - by_hand(value - 1e-6, place, terms, spec)) / 2e-6
        assert float(logprobs.grad[place]) == pytest.approx(slope, abs=1e-6)


def test_what_is_clipped_and_capped_is_counted_by_weight() -> None:
    logprobs, terms = drawn(0, kl=False)
    _, metrics = policy_loss(logprobs, terms, GRPO)
    ratio, trust = (logprobs - terms.old).exp(), (terms.old - terms.rollout).exp()
    clipped = torch.where(terms.advantages > 0, ratio > 1.28, ratio < 0.8)
    assert metrics["clip_share"] == pytest.approx(float((terms.weights * clipped).sum()))
    assert metrics["importance_capped"] == pytest.approx(float((terms.weights * (trust > 2)).sum()))
    assert 0 < metrics["clip_share"] < 1


def test_parts_add_up_to_the_whole() -> None:
    logprobs, terms = drawn(1, kl=False)
    whole, _ = policy_loss(logprobs, terms, GRPO)
    halves = [slice(0, 15), slice(15, 40)]
    parts = [
        policy_loss(
            logprobs[half], TokenTerms(terms.old[half], terms.rollout[half], terms.advantages[half], terms.weights[half]), GRPO
        )[0]
        for half in halves
    ]
    assert float(parts[0] + parts[1]) == pytest.approx(float(whole))
