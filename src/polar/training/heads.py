"""Log-probability and entropy of chosen tokens, without the logits of all of them at a time.

Rows of hidden states go through the output matrix in chunks; the backward pass computes each chunk again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 16 << 20  # of float32 logits that exist at a time: what fits a cache is four times as fast as what does not
FEWEST_ROWS = 128  # so that reading the output matrix pays


def score(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets`, and the entropies of the distributions that they were taken from.

    Args:
        hidden: [r, h], what predicts each token.
        weight: [v, h], the output matrix.
        targets: int64[r].
        temperature: float32[r], which logits are divided by; None for 1.

    Returns:
        float32[r] each, in nats; only the first has a gradient.
    """
    apply: Any = _Score.apply
    logprobs, entropy = apply(hidden, weight, targets, temperature)
    return logprobs, entropy


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(FEWEST_ROWS, CHUNK_BYTES // (4 * vocabulary))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _logits(hidden: Tensor, weight: Tensor, rows: slice, temperature: Tensor | None) -> Tensor:
    logits = (hidden[rows] @ weight.to(hidden.dtype).T).float()
    return logits if temperature is None else logits / temperature[rows, None]


class _Score(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for rows in _chunks(len(targets), len(weight)):
            logits = _logits(hidden, weight, rows, temperature)
            logits -= logits.logsumexp(1, keepdim=True)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0]
            entropy[rows] = -(logits.exp() * logits).sum(1)
        ctx.save_for_backward(hidden, weight, targets, temperature)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, targets, temperature = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in _chunks(len(targets), len(weight)):
            slope = _logits(hidden, weight, rows, temperature).softmax(1).neg_()
            slope.scatter_add_(1, targets[rows, None], torch.ones_like(slope[:, :1]))
            slope *= (grad[rows] if temperature is None else grad[rows] / temperature[rows])[:, None]
            slope = slope.to(hidden.dtype)
            to_hidden[rows] = slope @ weight.to(hidden.dtype)
            if to_weight is not None:
                to_weight += (slope.T @ hidden[rows]).to(weight.dtype)
        return to_hidden, to_weight, None, None
