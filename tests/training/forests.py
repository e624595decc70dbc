"""Random forests: trees that share context over sessions, with branches, built by hand."""

import numpy as np

from polar.trajectory.chains import Sampling
from polar.trajectory.forest import NONE, Forest

VOCABULARY = 256


def random_forest(seed: int = 0, sessions: int = 4, turns: int = 3, longest: int = 12, prefix: int = 20) -> Forest:
    """`sessions` on one prompt; each goes on for some turns of context and sampled tokens, and some of them branch."""
    rng = np.random.default_rng(seed)
    nodes: list[tuple[int, int, int, int]] = [(NONE, prefix, NONE, 0)]  # (parent, tokens, trace, session)

    def grow(parent: int, session: int, trace: int, left: int) -> int:
        """Turns below `parent`; the number of traces that there are then."""
        nodes.append((parent, int(rng.integers(1, longest)), NONE, session))
        nodes.append((len(nodes) - 1, int(rng.integers(1, longest)), trace, session))
        here, traces = len(nodes) - 1, trace + 1
        if left > 1:
            traces = max(traces, grow(here, session, trace, left - 1))
            if rng.random() < 0.5:
                traces = grow(here, session, traces, left - 1)
        return traces

    for session in range(sessions):
        grow(0, session, 0, turns)
    lengths = np.asarray([length for _, length, _, _ in nodes])
    bounds = np.cumsum([0, *lengths])
    total = int(bounds[-1])
    positions = np.empty(total, np.int32)
    for node, (parent, length, _, _) in enumerate(nodes):
        first = 0 if parent == NONE else positions[bounds[parent + 1] - 1] + 1
        positions[bounds[node] : bounds[node + 1]] = first + np.arange(length)
    traces = np.asarray([trace for _, _, trace, _ in nodes], np.int32)
    owners = np.asarray([session for _, _, _, session in nodes], np.int32)
    trained = traces != NONE
    mask = np.repeat(trained, lengths)
    share = np.bincount(owners[trained], lengths[trained], sessions)
    return Forest(
        ids=rng.integers(0, VOCABULARY, total).astype(np.int32),
        positions=positions,
        loss_mask=mask.astype(np.uint8),
        logprobs=np.where(mask, -rng.random(total), 0).astype(np.float32),
        policy_versions=np.where(mask, 0, NONE).astype(np.int32),
        bounds=bounds.astype(np.int64),
        parents=np.asarray([parent for parent, _, _, _ in nodes], np.int32),
        sampled=trained.astype(np.uint8),
        traces=traces,
        weights=np.where(trained, lengths / share[owners], 0.0),
        samplings=np.where(trained, 0, NONE).astype(np.int32),
        sessions=owners,
        choices=np.zeros(len(nodes), np.int32),
        call_ids=tuple(f"call-{node}" for node in range(len(nodes))),
        sampling=(Sampling(1.0, 1.0, 0, "raw"),),
        session_ids=tuple(f"session-{session}" for session in range(sessions)),
        rewards=rng.integers(0, 2, sessions).astype(np.float64),
    )
