"""Trainer and engine hold the same weights: proven before anything is sampled for training, where a path alone proves nothing.

The engine samples a few tokens, and the trainer computes their log-probabilities with its own forward pass, as the gate will.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from polar.engines.proofs import Sampled
from polar.engines.self_test import sample
from polar.engines.served import Served
from polar.errors import UsageError
from polar.training.batch import Layout
from polar.training.learner import Learner

REPLIES = 4  # at the same time, so that replicas share them
TOKENS = 16  # of a reply at most


async def prove_model(policy: Served, learner: Learner, expected: str, most: float) -> str:
    """Have `learner` find its own log-probabilities in what the engine samples; a line that says how near they are.

    Args:
        expected: what the engine was to have, for the error.
        most: mean |trainer - engine| in nats a token that is allowed.

    Raises:
        UsageError: they are further apart: the engine has other weights.
        EngineError: it does not answer.
    """
    replies = await asyncio.gather(*(sample(policy.engine, policy.info, policy.renderer, TOKENS) for _ in range(REPLIES)))
    has = f"it says that it serves {policy.info.model_path or policy.info.model}"
    highest = max(int(max(reply.prompt_ids.max(), reply.ids.max(initial=0))) for reply in replies)
    if highest >= learner.policy.vocabulary:
        raise UsageError(
            f"the engine has another model than {expected}: it samples token {highest}, and the trainer's vocabulary ends at "
            f"{learner.policy.vocabulary - 1}; {has}. Start it with the trainer's model"
        )
    own = await asyncio.to_thread(learner.score, side_by_side(replies))
    delta = float(np.abs(own - np.concatenate([reply.logprobs for reply in replies])).mean())
    if not delta <= most:
        raise UsageError(
            f"the engine has other weights than {expected}: over {len(own)} tokens that it sampled, mean δ to the trainer's own "
            f"log-probabilities is {delta:.3g} nats, at most {most:g} is allowed; {has}. Start it anew with the trainer's model"
        )
    return f"the engine has the trainer's weights: mean δ {delta:.1e} nats over {len(own)} tokens"


def side_by_side(replies: Sequence[Sampled]) -> Layout:
    """One pass over replies behind their prompts, each apart."""
    sequences = [np.concatenate([reply.prompt_ids, reply.ids]).astype(np.int64) for reply in replies]
    bounds = np.cumsum([0, *map(len, sequences)])
    starts = [np.arange(end - len(reply.ids), end) for reply, end in zip(replies, bounds[1:], strict=True)]
    ids, sampled = np.concatenate(sequences), np.concatenate(starts)
    return Layout(
        ids=ids,
        positions=np.concatenate([np.arange(len(each)) for each in sequences]),
        bounds=bounds,
        parents=np.full(len(sequences), -1, np.int32),
        reach=np.repeat(bounds[1:], np.diff(bounds)),
        predictors=sampled - 1,
        targets=ids[sampled],
        trained=np.arange(len(sampled)),
    )
