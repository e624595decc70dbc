"""Sessions as verl's batch: a `DataProto` with what its trainer reads of a rollout, and under the names that it reads.

A row is a trace: ids as sampled, `rollout_log_probs` of the engine, and the mask of the trace as `response_mask`: what tools and
users said between sampled turns is context, and not in the loss. verl takes one sequence of a sample, so a session with several
traces is refused, or one is chosen by a rule that is asked for by name; all that is left out is counted in `meta_info["polar"]`.
"""

from collections.abc import Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from verl import DataProto
from verl.utils.model import compute_position_id_with_mask

from polar.errors import CaptureError, UsageError
from polar.integrations.traces import Several, left_out, one_trace, trained_at
from polar.rollout.folder import RunFolder
from polar.specs import Trace, TrainingPolicy
from polar.store.capture import CaptureReader
from polar.store.captured import trajectory
from polar.store.ledger import LedgerReader
from polar.trajectory.builders import RESULT_BUILDER
from polar.trajectory.exclusion import PLAIN
from polar.trajectory.export import Exported

FEWEST = 2  # sessions of a group: verl takes the bare reward of one alone for its advantage


def stored_groups(path: Path, group_size: int, policy: TrainingPolicy = PLAIN) -> list[list[Exported]]:
    """The scored sessions of a run, `group_size` samples of a task in each group; of each sample the last attempt.

    Raises:
        UsageError: there is no run at `path`.
        CaptureError: tokens of a session cannot be trusted.
        StoreError: the run cannot be read.
    """
    folder = RunFolder.existing(path)
    with closing(LedgerReader.open(folder.ledger)) as ledger, closing(CaptureReader.open(folder.capture)) as reader:
        last = {(each.task_id, each.sample // group_size, each.sample): each.result for each in ledger.sessions()}
        return [
            [
                Exported(result, trajectory(reader, result, RESULT_BUILDER, policy))
                for key in keys
                if (result := last[key]) is not None and result.reward is not None
            ]
            for _, keys in groupby(sorted(last), key=lambda key: key[:2])
        ]


def data_proto(
    groups: Sequence[Sequence[Exported]],
    *,
    pad_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    several: Several = "refuse",
) -> DataProto:
    """The batch of some groups of sessions, each of one task; `uid` says which rows are of one group.

    Prompts are padded on the left, responses on the right; the reward stands in `rm_scores` at the last token of its row.

    Args:
        prompt_length, response_length: of all rows; None for that of the longest. Nothing is cut.
        several: of a session with several traces, `refuse` the whole batch, or train the `longest`.

    Raises:
        UsageError: a session has several traces, or is longer than rows are to be; or nothing is left to train.
        CaptureError: L01, log-probabilities cannot be computed again, or not all at the same temperature.
    """
    taken = [[(each, one_trace(each, several)) for each in group] for group in groups]
    usable = [[(each, trace) for each, trace in group if trace is not None] for group in taken]
    chosen = [
        (f"{each.result.task_id}/{number}", each, trace)
        for number, group in enumerate(usable)
        if len(group) >= FEWEST
        for each, trace in group
    ]
    if not chosen:
        raise UsageError(f"no group has {FEWEST} sessions with a reward and a trained token, so there is nothing to train")
    traces = [trace for _, _, trace in chosen]
    prompts, seen = _padded([trace.prompt_ids for trace in traces], prompt_length, pad_id, "prompt", left=True)
    responses, answered = _padded([trace.response_ids for trace in traces], response_length, pad_id, "response")
    width = responses.shape[1]
    attention_mask = torch.cat([seen, answered], dim=1)
    scores = torch.zeros(responses.shape)
    scores[torch.arange(len(traces)), answered.sum(1) - 1] = torch.tensor([trace.reward for trace in traces])
    versions = [[span.policy_version for span in trace.policy_versions] for trace in traces]
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": compute_position_id_with_mask(attention_mask),
            "response_mask": _padded([trace.loss_mask for trace in traces], width, 0, "mask")[0],
            "rollout_log_probs": _filled([trace.response_logprobs for trace in traces], width),
            "rm_scores": scores,
        },
        non_tensors={
            "uid": _objects([uid for uid, _, _ in chosen]),
            "session_id": _objects([each.result.session_id for _, each, _ in chosen]),
            "min_global_steps": _objects([min(each) for each in versions]),
            "max_global_steps": _objects([max(each) for each in versions]),
            "multi_modal_inputs": _objects([{} for _ in chosen]),
            "__num_turns__": np.asarray([len(trace.call_ids) for trace in traces], np.int32),
        },
        meta_info={
            "temperature": _temperature(traces),
            "reward_extra_keys": [],
            "polar": {
                "tokens_left_out": sum(left_out(each, trace) for group in taken for each, trace in group)
                + sum(int(trace.loss_mask.sum()) for group in usable if len(group) < FEWEST for _, trace in group),
                "sessions_left_out": sum(map(len, groups)) - len(chosen),
            },
        },
    )


def _temperature(traces: Sequence[Trace]) -> float:
    found = {trained_at(trace) for trace in traces}
    if len(found) > 1:
        raise CaptureError("L01", f"expected one temperature in a batch, as verl has it, got {sorted(found)}")
    return found.pop()


def _padded(
    rows: Sequence[NDArray[np.integer[Any]]], width: int | None, fill: int, what: str, *, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Int64[rows, width], and where it is not padding."""
    longest = max(map(len, rows))
    width = longest if width is None else width
    if longest > width:
        raise UsageError(f"a {what} has {longest} tokens, and rows are to have {width}; nothing is cut: raise {what}_length")
    ids, mask = torch.full((len(rows), width), fill), torch.zeros((len(rows), width), dtype=torch.int64)
    for place, row in enumerate(rows):
        at = slice(width - len(row), width) if left else slice(len(row))
        ids[place, at] = torch.from_numpy(row.astype(np.int64))
        mask[place, at] = 1
    return ids, mask


def _filled(rows: Sequence[NDArray[np.float32]], width: int) -> Tensor:
    values = torch.zeros((len(rows), width))
    for place, row in enumerate(rows):
        values[place, : len(row)] = torch.from_numpy(row.copy())
    return values


def _objects(values: Sequence[object]) -> NDArray[np.object_]:
    made = np.empty(len(values), object)
    made[:] = values
    return made
