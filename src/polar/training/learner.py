"""Changes the policy's weights: one batch in, one or more optimiser steps, metrics out.

Nothing is changed by a batch that does not prove itself: gradients are summed over all passes first, δ is known by then, and
only after that the optimiser steps. Given the same weights, optimiser state and batches, a CPU computes the same bits.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polar.errors import CaptureError, UsageError
from polar.specs import Float32Array
from polar.training.batch import Batch, Layout, Tokens
from polar.training.config import TrainConfig
from polar.training.distributed import ALONE, Pass, Ranks, like, whole
from polar.training.gates import check_delta, check_versions, temperatures
from polar.training.loss import TokenTerms, policy_loss
from polar.training.packing import layouts, tokens
from polar.training.policy import Policy
from polar.trajectory.forest import Forest

WEIGHTS, OPTIMIZER = "trained.safetensors", "optimizer.pt"


@dataclass(frozen=True)
class _Known:
    """What is known of each trained token before weights change; float32[t].

    Attributes:
        old: its log-probability; None where that is what the pass itself computes.
    """

    old: Float32Array | None
    reference: Float32Array | None


class Learner:
    """A policy with its optimiser.

    Of several processes (`ranks`) each makes one and calls the same methods with the same arguments; each has the same metrics.

    Attributes:
        steps: optimiser steps made.
    """

    def __init__(self, policy: Policy, config: TrainConfig, ranks: Ranks = ALONE) -> None:
        self.policy = policy
        self.steps = 0
        self._config = config
        self._ranks = ranks
        wanted = config.optimizer
        if config.algorithm.kl:
            policy.keep_reference()
        ranks.shard(policy)
        self._trained = {name: each for name, each in policy.named_parameters() if each.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._trained.values(), lr=wanted.lr, betas=wanted.betas, eps=wanted.eps, weight_decay=wanted.weight_decay
        )

    def update(self, batch: Batch) -> dict[str, float]:
        """Train on a batch; its metrics.

        Raises:
            CaptureError: the batch does not prove itself (L01, L02, L03, W01); the weights are as before.
        """
        began = time.perf_counter()
        spec = self._config.algorithm
        known = tokens(batch, spec.aggregation)
        check_versions(known, batch.version)
        heat = temperatures(batch.forest)
        passes = layouts(batch.forest, self._config.model.max_tokens, self.policy.packing)
        train = self._one_step if spec.minibatches == 1 else self._steps
        metrics = train(batch, known, heat, passes)
        seconds = time.perf_counter() - began
        computed = sum(len(each.ids) for each in passes)
        return metrics | {
            "tokens_trained": float(len(known.ids)),
            "tokens_computed": float(computed),
            "passes": float(len(passes)),
            "seconds/train": seconds,
            "tokens_per_second/train": computed / seconds,
        }

    def supervise(self, forest: Forest, weights: Float32Array, lr: float | None = None) -> dict[str, float]:
        """One step on the weighted negative log-likelihood of the forest's t trained tokens; `weights` float32[t] sum to 1.

        Args:
            lr: of this step; None for the optimiser's own.

        Raises:
            CaptureError: L02, loss or gradient is not finite; the weights are as before.
        """
        sums: dict[str, float] = defaultdict(float)
        for layout, counts in self._ranks.share(layouts(forest, self._config.model.max_tokens, self.policy.packing)):
            scores = self.policy(layout)
            share = _on(self.policy, weights[layout.trained] * np.float32(counts))
            loss = -(share * scores.logprobs).sum()
            loss.backward()
            sums["loss"] += float(loss.detach())
            sums["entropy"] += float((share * scores.entropy).sum())
        return self._step(sums, lr)

    def logprobs(self, forest: Forest) -> Float32Array:
        """Log-probability of each of the forest's t trained tokens, float32[t]; nothing is learned."""
        passes = layouts(forest, self._config.model.max_tokens, self.policy.packing)
        return self._scored(np.ones(int(forest.loss_mask.sum()), np.float32), passes, lambda *given: self.policy(*given).logprobs)

    @torch.no_grad()
    def score(self, layout: Layout) -> Float32Array:
        """Log-probabilities of a layout's trained tokens at temperature 1, float32[r]."""
        values: Float32Array = self.policy(layout).logprobs.cpu().numpy()
        return values

    def save(self, directory: Path) -> None:
        """Write trained weights, optimiser and random state into a directory that exists; any number of processes reads it."""
        weights = {name: whole(each.detach()).cpu().contiguous() for name, each in self._trained.items()}
        optimizer = self._with_moments(self._optimizer.state_dict(), lambda moment, _: whole(moment).cpu())
        state = {"optimizer": optimizer, "steps": self.steps, "rng": torch.get_rng_state()}
        if self._ranks.main:
            save_file(weights, directory / WEIGHTS)
            torch.save(state, directory / OPTIMIZER)

    def restore(self, directory: Path) -> None:
        """Go on from what `save` wrote.

        Raises:
            UsageError: it is of another model.
        """
        stored = load_file(directory / WEIGHTS)
        shapes = {name: tuple(each.shape) for name, each in self._trained.items()}
        if {name: tuple(each.shape) for name, each in stored.items()} != shapes:
            raise UsageError(f"{directory} holds the weights of another model; expected those of {self._config.model.path}")
        with torch.no_grad():
            for name, each in self._trained.items():
                each.copy_(like(stored[name], each))
        state: Mapping[str, Any] = torch.load(directory / OPTIMIZER, weights_only=True)
        self._optimizer.load_state_dict(self._with_moments(state["optimizer"], like))
        self.steps = state["steps"]
        torch.set_rng_state(state["rng"])

    def export(self, directory: Path, adapter: bool = False) -> None:
        """Write the policy as a model directory that every engine can serve, or its LoRA adapter alone; see `Policy.save`."""
        policy = self.policy
        if self._ranks.world > 1:
            weights = {name: whole(each.detach()).cpu() for name, each in self._trained.items()}
            if not self._ranks.main:
                return
            policy = policy.twin()
            policy.load_state_dict(weights, strict=False)
        if adapter:
            policy.save_adapter(directory)
        else:
            policy.save(directory)

    def _one_step(self, batch: Batch, known: Tokens, heat: Float32Array, passes: Sequence[Layout]) -> dict[str, float]:
        """All gradients in one go: the old log-probabilities are the new ones, whose ratio is 1 and whose slope is that of ρ."""
        before = _Known(None, self._reference(heat, passes))
        logprobs = np.zeros(len(known.ids), np.float32)
        sums: dict[str, float] = defaultdict(float)
        for each in self._ranks.share(passes):
            values = self._accumulate(each, known, heat, before, sums)
            if each.counts:
                logprobs[each.layout.trained] = values
        logprobs = self._ranks.total(logprobs)
        try:
            distance = check_delta(batch, known, logprobs, self._config.algorithm)
        except CaptureError:
            self._optimizer.zero_grad()
            raise
        return self._step(sums) | distance

    def _steps(self, batch: Batch, known: Tokens, heat: Float32Array, passes: Sequence[Layout]) -> dict[str, float]:
        """Several steps: what the old weights say of each token is computed first."""
        old = self._scored(heat, passes, lambda layout, temperature: self.policy(layout, temperature).logprobs)
        distance = check_delta(batch, known, old, self._config.algorithm)
        before = _Known(old, self._reference(heat, passes))
        metrics: list[dict[str, float]] = []
        for part in _parts(passes, self._config.algorithm.minibatches):
            share = float(sum(known.weights[layout.trained].sum() for layout in part))
            if share <= 0:
                continue
            sums: dict[str, float] = defaultdict(float)
            for each in self._ranks.share(part):
                self._accumulate(each, known, heat, before, sums, scale=1 / share)
            metrics.append(self._step(sums))
        return {name: float(np.mean([each[name] for each in metrics])) for name in metrics[0]} | distance

    def _accumulate(
        self, each: Pass, known: Tokens, heat: Float32Array, before: _Known, sums: dict[str, float], scale: float = 1.0
    ) -> Float32Array:
        """Add the gradients of one pass; the log-probabilities of its trained tokens."""
        layout, at = each.layout, each.layout.trained
        scores = self.policy(layout, _on(self.policy, heat[at]))
        terms = TokenTerms(
            old=scores.logprobs.detach() if before.old is None else _on(self.policy, before.old[at]),
            rollout=_on(self.policy, known.logprobs[at]),
            advantages=_on(self.policy, known.advantages[at]),
            weights=_on(self.policy, known.weights[at] * np.float32(scale if each.counts else 0)),
            reference=None if before.reference is None else _on(self.policy, before.reference[at]),
        )
        loss, metrics = policy_loss(scores.logprobs, terms, self._config.algorithm)
        loss.backward()  # type: ignore[no-untyped-call]
        metrics["entropy"] = float((terms.weights * scores.entropy).sum())
        for name, value in metrics.items():
            sums[name] += value
        logprobs: Float32Array = scores.logprobs.detach().cpu().numpy()
        return logprobs

    def _reference(self, heat: Float32Array, passes: Sequence[Layout]) -> Float32Array | None:
        return self._scored(heat, passes, self.policy.reference) if self._config.algorithm.kl else None

    @torch.no_grad()
    def _scored(self, heat: Float32Array, passes: Sequence[Layout], score: Callable[[Layout, Tensor], Tensor]) -> Float32Array:
        """What `score` says of each trained token, float32[t]."""
        values = np.zeros(len(heat), np.float32)
        for layout, counts in self._ranks.share(passes):
            scores = score(layout, _on(self.policy, heat[layout.trained]))
            if counts:
                values[layout.trained] = scores.cpu().numpy()
        return self._ranks.total(values)

    def _with_moments(self, state: Mapping[str, Any], change: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
        """The optimiser's state, with each moment changed by what `change` says of it and its parameter."""
        parameters = list(self._trained.values())
        changed = {
            place: {name: value if name == "step" else change(value, parameters[place]) for name, value in moments.items()}
            for place, moments in state["state"].items()
        }
        return {**state, "state": changed}

    def _step(self, sums: Mapping[str, float], lr: float | None = None) -> dict[str, float]:
        """Clip the gradients, and step; `sums` over all processes.

        Raises:
            CaptureError: L02, loss or gradient is not finite; the weights are as before.
        """
        wanted = self._config.optimizer
        sums = self._ranks.totals(sums)
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self._trained.values(), wanted.max_grad_norm)))
        if not (np.isfinite(norm) and np.isfinite(sums["loss"])):
            self._optimizer.zero_grad()
            raise CaptureError(
                "L02", f"loss {sums['loss']:g} and gradient norm {norm:g} are not finite; the weights are as before"
            )
        rate = wanted.lr * min(1.0, (self.steps + 1) / (wanted.warmup_steps + 1)) if lr is None else lr
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        return sums | {"grad_norm": norm, "lr": rate}


def _on(policy: Policy, values: Float32Array) -> Tensor:
    return torch.from_numpy(values).to(next(policy.parameters()).device)


def _parts(passes: Sequence[Layout], count: int) -> Iterator[Sequence[Layout]]:
    """`count` parts of about as many trained tokens each, of whole passes."""
    total = sum(len(each.trained) for each in passes)
    part: list[Layout] = []
    reached, made = 0, 0
    for each in passes:
        part.append(each)
        reached += len(each.trained)
        if reached >= total * (made + 1) / count:
            yield part
            part, made = [], made + 1
    if part:
        yield part
