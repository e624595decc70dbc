"""Traces as Arrow tables, for Parquet. Apart from the other exports, because Arrow costs 30 MB to import."""

from collections.abc import Mapping

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Struct

from polar.errors import UsageError
from polar.specs import Branch, CallKind, Trace
from polar.trajectory.builders import spans_of
from polar.trajectory.checking import trace_fault
from polar.trajectory.export import Exported, Placed, message_json, sampling_json, token_versions, tool_json
from polar.trajectory.forest import NONE
from polar.trajectory.reading import read_messages, read_tools


def table(exported: Exported) -> pa.Table:
    """One row per trace; messages and tools are JSON text. `policy_versions` has -1 where a token is not trained."""
    rows = [_row(exported, index, trace) for index, trace in enumerate(exported.trajectory.traces)]
    return pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in _COLUMNS.items()})


def read_table(rows: pa.Table) -> list[Placed]:
    """The traces of tables that `table` made.

    Raises:
        UsageError: they were made by something else, or changed.
    """
    try:
        return [_placed(row) for row in msgspec.convert(rows.to_pylist(), list[_Row])]
    except (msgspec.MsgspecError, OverflowError, IndexError) as error:  # a number or a list of another length
        raise UsageError(f"expected traces as `polar export --format parquet` writes them: {error}") from None


class _Row(Struct):
    """A row that was read; see `_COLUMNS`."""

    session_id: str
    task_id: str
    sample: int
    trace: int
    reward: float | None
    weight: float
    finish_reason: str
    kind: CallKind
    parent_trace: int | None
    temperature: float
    top_p: float
    top_k: int
    logprobs_mode: str
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    response_logprobs: list[float]
    policy_versions: list[int]
    call_ids: tuple[str, ...]
    answers: tuple[int, ...]
    prompt_messages: str
    response_messages: str
    tools: str


def _placed(row: _Row) -> Placed:
    versions, mask = np.asarray(row.policy_versions, np.int32), np.asarray(row.loss_mask, np.uint8)
    trace = Trace(
        prompt_ids=np.asarray(row.prompt_ids, np.int32),
        response_ids=np.asarray(row.response_ids, np.int32),
        loss_mask=mask,
        response_logprobs=np.asarray(row.response_logprobs, np.float32),
        policy_versions=spans_of(versions[mask == 1]),
        call_ids=row.call_ids,
        prompt_messages=read_messages(row.prompt_messages),
        response_messages=read_messages(row.response_messages),
        tools=read_tools(row.tools),
        finish_reason=row.finish_reason,
        temperature=row.temperature,
        top_p=row.top_p,
        top_k=row.top_k,
        logprobs_mode=row.logprobs_mode,
        reward=row.reward,
        weight=row.weight,
        branch=Branch(row.kind, row.parent_trace),
        answers=row.answers,
    )
    stray = "a token that is not trained has a policy version" if (versions[mask == 0] != NONE).any() else ""
    if fault := trace_fault(trace) or stray:
        raise UsageError(
            f"trace {row.trace} of session {row.session_id} is not as `polar export --format parquet` wrote it: {fault}"
        )
    return Placed(row.session_id, row.task_id, row.sample, row.trace, trace)


_COLUMNS: Mapping[str, pa.DataType] = {
    "session_id": pa.string(),
    "task_id": pa.string(),
    "sample": pa.int32(),
    "trace": pa.int32(),
    "status": pa.string(),
    "reward": pa.float64(),
    "weight": pa.float64(),
    "finish_reason": pa.string(),
    "kind": pa.string(),
    "parent_trace": pa.int32(),
    "temperature": pa.float64(),
    "top_p": pa.float64(),
    "top_k": pa.int32(),
    "logprobs_mode": pa.string(),
    "prompt_ids": pa.list_(pa.int32()),
    "response_ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.uint8()),
    "response_logprobs": pa.list_(pa.float32()),
    "policy_versions": pa.list_(pa.int32()),
    "call_ids": pa.list_(pa.string()),
    "answers": pa.list_(pa.int32()),
    "prompt_messages": pa.string(),
    "response_messages": pa.string(),
    "tools": pa.string(),
}


SCHEMA = pa.schema(_COLUMNS.items())


def _row(exported: Exported, index: int, trace: Trace) -> dict[str, object]:
    return {
        "session_id": exported.result.session_id,
        "task_id": exported.result.task_id,
        "sample": exported.result.sample,
        "trace": index,
        "status": exported.result.status,
        "reward": trace.reward,
        "weight": trace.weight,
        "finish_reason": trace.finish_reason,
        "kind": trace.branch.kind,
        "parent_trace": trace.branch.parent_trace,
        **sampling_json(trace),
        "prompt_ids": trace.prompt_ids,
        "response_ids": trace.response_ids,
        "loss_mask": trace.loss_mask,
        "response_logprobs": trace.response_logprobs,
        "policy_versions": token_versions(trace),
        "call_ids": list(trace.call_ids),
        "answers": list(trace.answers),
        "prompt_messages": _text([message_json(message) for message in trace.prompt_messages]),
        "response_messages": _text([message_json(message) for message in trace.response_messages]),
        "tools": _text([tool_json(tool) for tool in trace.tools]),
    }


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
