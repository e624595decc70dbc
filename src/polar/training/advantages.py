"""What a session's reward is worth next to those of its group."""

import numpy as np

from polar.training.batch import Float64Array
from polar.training.config import Advantage

EPSILON = 1e-6  # keeps a group whose rewards hardly differ from being blown up


def advantages(rewards: Float64Array, kind: Advantage) -> Float64Array:
    """Advantages of a group's g sessions, float64[g]; exactly 0 where all rewards are equal.

    - `mean_std`: (r - mean) / (std + 1e-6), the standard deviation being that of the group: GRPO (arXiv 2402.03300).
    - `mean`: r - mean, which does not weigh easy and hard tasks up: Dr. GRPO (arXiv 2503.20783).
    - `leave_one_out`: r - mean of the others, an unbiased baseline: RLOO (arXiv 2402.14740).

    Raises:
        ValueError: a reward is not finite.
    """
    if not np.isfinite(rewards).all():
        raise ValueError(f"expected finite rewards, got {rewards.tolist()}")
    if len(rewards) == 0 or np.all(rewards == rewards[0]):
        return np.zeros(len(rewards))
    scale = {
        "mean_std": 1 / (float(rewards.std()) + EPSILON),
        "mean": 1.0,
        "leave_one_out": len(rewards) / (len(rewards) - 1),
    }[kind]
    worth: Float64Array = (rewards - rewards.mean()) * scale
    return worth
