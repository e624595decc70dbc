"""Traces as an Arrow table, for Parquet. Apart from the other exports, because Arrow costs 30 MB to import."""

from collections.abc import Mapping, Sequence

import msgspec
import pyarrow as pa

from polar.specs import Trace
from polar.trajectory.export import Exported, message_json, sampling_json, token_versions, tool_json


def table(sessions: Sequence[Exported]) -> pa.Table:
    """One row per trace; messages and tools are JSON text. `policy_versions` has -1 where a token is not trained."""
    rows = [_row(exported, index, trace) for exported in sessions for index, trace in enumerate(exported.trajectory.traces)]
    columns = {name: pa.array([row[name] for row in rows], kind) for name, kind in _COLUMNS.items()}
    return pa.table(columns)


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
    "prompt_messages": pa.string(),
    "response_messages": pa.string(),
    "tools": pa.string(),
}


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
        "prompt_messages": _text([message_json(message) for message in trace.prompt_messages]),
        "response_messages": _text([message_json(message) for message in trace.response_messages]),
        "tools": _text([tool_json(tool) for tool in trace.tools]),
    }


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
