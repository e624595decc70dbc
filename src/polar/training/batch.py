"""What the trainer computes: a batch of trees, its trained tokens, and the forward passes that it is cut into. NumPy only."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polar.specs import Float32Array, Int32Array
from polar.trajectory.forest import Forest

Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]


@dataclass(frozen=True)
class Batch:
    """Sessions to train on.

    Attributes:
        forest: of all of them; t trained tokens, s sessions.
        advantages: float64[s], in the order of `forest.session_ids`.
        version: policy version that trains on it, the newest.
    """

    forest: Forest
    advantages: Float64Array
    version: int


@dataclass(frozen=True)
class Tokens:
    """The t trained tokens of a batch, in the order of the forest.

    Attributes:
        ids: int32[t].
        advantages: float32[t], of the session.
        weights: float32[t], share of the loss; they sum to 1.
        logprobs: float32[t], as the engine sampled them.
        versions: int32[t], policy version that sampled.
    """

    ids: Int32Array
    advantages: Float32Array
    weights: Float32Array
    logprobs: Float32Array
    versions: Int32Array


@dataclass(frozen=True)
class Layout:
    """One forward pass: n tokens, r of them trained, in m nodes. They are laid out as a walk: what hangs below a node follows it.

    Token j may attend token i if `i <= j < reach[i]`. Where every node is a root, sequences stand side by side, apart.

    Attributes:
        ids, positions: int64[n]; positions count from the root.
        bounds: int64[m + 1]; node i has the tokens from `bounds[i]` to `bounds[i + 1]`.
        parents: int32[m], -1 for a root.
        reach: int64[n], one past the last token of what hangs below the token's node, itself included.
        predictors: int64[r], place among the n whose output predicts the trained token: the one before it in its sequence.
        targets: int64[r], the trained tokens' ids.
        trained: int64[r], their places among the t tokens of the batch. Each of those is in exactly one layout.
    """

    ids: Int64Array
    positions: Int64Array
    bounds: Int64Array
    parents: Int32Array
    reach: Int64Array
    predictors: Int64Array
    targets: Int64Array
    trained: Int64Array
