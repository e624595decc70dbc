"""What vLLM tells of tokens besides their log-probabilities, where its server is started for it.

`routed_experts` (`--enable-return-routed-experts`, of a mixture of experts): which experts each layer chose, for a trainer that
routes as the engine did. It comes once, of every token that went through the model: the prompt, and all that was sampled but
the last. A sampled token is the work of the pass of the token before it, so its row is that one, and as many rows as tokens are
the last ones. `sampling_mask` (`--return-sampling-mask`): the ids that top-k, top-p and a grammar left to sample from.
"""

import binascii
import io
from base64 import b64decode
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polar.chat import Usage
from polar.errors import EngineError
from polar.specs import NO_EXTRAS, Extras, Int32Array

ROUTED_EXPERTS = "routed_experts"
SAMPLING_MASK = "sampling_mask"


def extras(routed: str, masks: Sequence[Sequence[int]], sampled: int, usage: Usage | None) -> Extras:
    """What came with a generation of `sampled` tokens; counts that do not fit are left for the detector (T08).

    Args:
        routed: base64 of a `.npy` file; "" for none.
        masks: the ids of each token; none where nothing came.
    """
    if not routed and not masks:
        return NO_EXTRAS
    told: dict[str, NDArray[np.generic]] = {}
    if routed:
        told[ROUTED_EXPERTS] = _of_sampled(_array(routed), sampled, usage)
    if masks:
        told[SAMPLING_MASK] = _padded(masks)
    return told


def _of_sampled(rows: NDArray[np.generic], sampled: int, usage: Usage | None) -> NDArray[np.generic]:
    """uint8 or uint16 [sampled, layers, experts per token], without the prompt's rows where these came along."""
    whole = usage is not None and len(rows) == usage.prompt_tokens + sampled - 1
    return rows[len(rows) - sampled :] if whole else rows


def _array(text: str) -> NDArray[np.generic]:
    try:
        array: NDArray[np.generic] = np.load(io.BytesIO(b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError) as error:
        raise EngineError(f"the engine sent routed experts that are no array: {error}") from error
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise EngineError(f"expected routed experts as integers of [tokens, layers, experts], got {array.dtype}{array.shape}")
    return array


def _padded(masks: Sequence[Sequence[int]]) -> Int32Array:
    """int32[tokens, longest], -1 behind the ids of a shorter one."""
    rows = np.full((len(masks), max(map(len, masks))), -1, np.int32)
    for row, ids in zip(rows, masks, strict=True):
        row[: len(ids)] = ids
    return rows
