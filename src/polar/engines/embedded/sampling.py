"""Picks tokens. Log-probabilities are raw: the log-softmax of the model's logits, whatever the temperature."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.requests import FutureRequestState

from polar.engines.embedded.wire import SamplingParams


class Sample(NamedTuple):
    """A sampled token. `rank` is 1 for the likeliest; `version` names the weights."""

    token_id: int
    logprob: float
    rank: int
    version: str


@dataclass
class Draw:
    """How one request samples, and what it has sampled."""

    params: SamplingParams
    stop_ids: frozenset[int]
    samples: list[Sample] = field(default_factory=list)
    random: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        self.random.manual_seed(secrets.randbits(63) if self.params.seed is None else self.params.seed)

    def pick(self, logits: Tensor) -> int:
        """A token id from float32 logits [vocabulary]. The same seed and logits give the same ids, in any batch."""
        params = self.params
        if len(self.samples) < params.min_tokens:
            logits = logits.index_fill(0, torch.tensor(sorted(self.stop_ids)), -math.inf)
        if params.temperature == 0:
            return int(logits.argmax())
        scores = logits / params.temperature
        if params.top_k > 0:
            least = scores.topk(min(params.top_k, len(scores))).values[-1]
            scores = scores.masked_fill(scores < least, -math.inf)
        probabilities = scores.double().softmax(0)
        if params.top_p < 1:
            probabilities = _nucleus(probabilities, params.top_p)
        cumulative = probabilities.cumsum(0)
        point = torch.rand(1, generator=self.random, dtype=torch.float64) * cumulative[-1]
        return int(torch.searchsorted(cumulative, point, right=True))


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The likeliest tokens that reach `top_p` together; the others get zero."""
    ordered, ids = probabilities.sort(descending=True)
    before = ordered.cumsum(0) - ordered
    return torch.zeros_like(probabilities).scatter(0, ids, ordered.masked_fill(before >= top_p, 0.0))


class Sampler(ContinuousBatchingLogitsProcessor):
    """Samples in the place of a logits processor, which is where transformers says whose row is whose.

    It answers with one-hot scores, so that the manager's greedy choice takes what was picked.

    Attributes:
        version: of the weights, stamped on each token.
    """

    supported_kwargs: dict[str, type] = {}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, draws: Mapping[str, Draw], version: str) -> None:
        self.version = version
        self._draws = draws
        self._rows: list[Draw | None] = []

    def as_list(self) -> ContinuousBatchingLogitsProcessorList:
        """The processors that a manager is to use: this one alone."""
        processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([self]))
        processors.tensors_required = 1
        return processors

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Nothing travels by tensor."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> Tensor:
        """Note whose rows come next. A request that was aborted has left the table, but still has its row."""
        self._rows = [self._draws.get(request.state.request_id) for request in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Sample for each row of raw logits [rows, vocabulary]; rows beyond the noted ones are padding."""
        picked = torch.zeros_like(scores)
        logprobs = scores.log_softmax(-1)
        for row, draw in enumerate(self._rows):
            if draw is not None:
                token = draw.pick(scores[row])
                rank = int((scores[row] > scores[row, token]).sum()) + 1
                draw.samples.append(Sample(token, float(logprobs[row, token]), rank, self.version))
                picked[row, token] = 1.0
        return picked
