"""Log-probabilities in chunks are those of the whole, and so are their gradients."""

import pytest
import torch

from polar.training import heads


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_chunks_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch, rows: int, temperature: float | None) -> None:
    monkeypatch.setattr(heads, "CHUNK_BYTES", rows * 4 * 50)
    monkeypatch.setattr(heads, "FEWEST_ROWS", 1)
    torch.manual_seed(0)
    hidden, weight = torch.randn(33, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    leaves = [hidden, weight]
    targets, share = torch.randint(0, 50, (33,)), torch.rand(33)
    heat = None if temperature is None else torch.full((33,), temperature)
    logprobs, entropy = heads.score(hidden, weight, targets, heat)
    found = torch.autograd.grad((logprobs * share).sum(), leaves)
    whole = ((hidden @ weight.T) / (temperature or 1.0)).log_softmax(-1)
    wanted = torch.autograd.grad((whole.gather(1, targets[:, None])[:, 0] * share).sum(), leaves)
    assert torch.allclose(logprobs, whole.gather(1, targets[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(entropy, -(whole.exp() * whole).sum(1), atol=1e-5)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    chunk = heads._logits

    def watched(*args: object) -> torch.Tensor:
        logits = chunk(*args)  # type: ignore[arg-type]
        made.append(logits.numel() * 4)
        return logits

    monkeypatch.setattr(heads, "CHUNK_BYTES", 4 * 50 * 10)
    monkeypatch.setattr(heads, "FEWEST_ROWS", 1)
    monkeypatch.setattr(heads, "_logits", watched)
    hidden = torch.randn(500, 8, requires_grad=True)
    logprobs, _ = heads.score(hidden, torch.randn(50, 8), torch.zeros(500, dtype=torch.int64))
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert len(made) == 100, "50 chunks, forward and backward"
    assert max(made) <= 4 * 50 * 10
