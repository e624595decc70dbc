"""Trajectories as others read them: JSON in the published shape, and tensors for safetensors (`arrow` has tables for Parquet).

Everything here makes values or bytes; who asked writes the file.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from polar.chat import Message, Tool
from polar.specs import SessionResult, Trace, Trajectory


@dataclass(frozen=True)
class Exported:
    """A finished session with its traces."""

    result: SessionResult
    trajectory: Trajectory


def session_json(exported: Exported) -> dict[str, object]:
    """`SessionResult` in the published shape."""
    result = exported.result
    return {
        "session_id": result.session_id,
        "task_id": result.task_id,
        "status": result.status,
        "trajectory": trajectory_json(exported.trajectory),
        "timing": msgspec.to_builtins(result.timing),
        "node_id": None,
        "error": result.error or None,
        "metadata": {"sample": result.sample, "reward": result.reward, "sandbox": result.sandbox, **result.metadata},
    }


def trajectory_json(trajectory: Trajectory) -> dict[str, object]:
    """`Trajectory` in the published shape."""
    return {
        "status": trajectory.status,
        "traces": [trace_json(trace) for trace in trajectory.traces],
        "metadata": {
            "accounting": msgspec.to_builtins(trajectory.accounting),
            "builder": trajectory.builder,
            "findings": msgspec.to_builtins(trajectory.findings),
        },
        "error": trajectory.error or None,
    }


def trace_json(trace: Trace) -> dict[str, object]:
    """`Trace` in the published shape; `policy_versions`, `weight` and `branch` are added, `metadata` has calls and sampling."""
    return {
        "prompt_ids": trace.prompt_ids.tolist(),
        "response_ids": trace.response_ids.tolist(),
        "loss_mask": trace.loss_mask.tolist(),
        "response_logprobs": trace.response_logprobs.tolist(),
        "prompt_messages": [message_json(message) for message in trace.prompt_messages],
        "response_messages": [message_json(message) for message in trace.response_messages],
        "tools": [tool_json(tool) for tool in trace.tools],
        "finish_reason": trace.finish_reason,
        "reward": trace.reward,
        "metadata": {"call_ids": list(trace.call_ids), **sampling_json(trace)},
        "policy_versions": msgspec.to_builtins(trace.policy_versions),
        "weight": trace.weight,
        "branch": msgspec.to_builtins(trace.branch),
    }


def sampling_json(trace: Trace) -> dict[str, object]:
    """How the trained tokens were sampled, and what their log-probabilities are of."""
    return {
        "temperature": trace.temperature,
        "top_p": trace.top_p,
        "top_k": trace.top_k,
        "logprobs_mode": trace.logprobs_mode,
    }


def message_json(message: Message) -> dict[str, object]:
    """A message in the shape of OpenAI Chat."""
    body: dict[str, object] = {"role": message.role, "content": message.text}
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    return body


def tool_json(tool: Tool) -> dict[str, object]:
    """A tool in the shape of OpenAI Chat."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def token_versions(trace: Trace) -> NDArray[np.int32]:
    """Policy version of each response token, -1 where the token is not trained; int32[r]."""
    trained = np.full(int(trace.loss_mask.sum()), -1, np.int32)
    for span in trace.policy_versions:
        trained[span.start : span.end] = span.policy_version
    versions = np.full(len(trace.response_ids), -1, np.int32)
    versions[trace.loss_mask.astype(bool)] = trained
    return versions


def tensors(sessions: Sequence[Exported]) -> bytes:
    """A safetensors file of all traces laid end to end.

    Tensors, with n traces and t tokens in all: `input_ids` int32[t] (prompt then response), `loss_mask` uint8[t],
    `logprobs` float32[t] (0 where the mask is 0), `policy_versions` int32[t] (-1 where the mask is 0), `cu_seqlens`
    int64[n + 1], `prompt_lengths` int32[n], `rewards` float32[n] (NaN for none), `weights` float32[n]. The header's
    `traces` is a JSON list of (session_id, task_id, sample, trace), its `sampling` one of {temperature, top_p, top_k,
    logprobs_mode}, a trace each.
    """
    flat = [(exported, index, trace) for exported in sessions for index, trace in enumerate(exported.trajectory.traces)]
    traces = [trace for _, _, trace in flat]
    lengths = [len(trace.prompt_ids) + len(trace.response_ids) for trace in traces]
    arrays: dict[str, NDArray[np.generic]] = {
        "input_ids": _joined([part for trace in traces for part in (trace.prompt_ids, trace.response_ids)], np.int32),
        "loss_mask": _joined([_padded(trace, trace.loss_mask, 0) for trace in traces], np.uint8),
        "logprobs": _joined([_padded(trace, trace.response_logprobs, 0) for trace in traces], np.float32),
        "policy_versions": _joined([_padded(trace, token_versions(trace), -1) for trace in traces], np.int32),
        "cu_seqlens": np.cumsum([0, *lengths], dtype=np.int64),
        "prompt_lengths": np.asarray([len(trace.prompt_ids) for trace in traces], np.int32),
        "rewards": np.asarray([np.nan if trace.reward is None else trace.reward for trace in traces], np.float32),
        "weights": np.asarray([trace.weight for trace in traces], np.float32),
    }
    names = [(e.result.session_id, e.result.task_id, e.result.sample, index) for e, index, _ in flat]
    sampling = [sampling_json(trace) for trace in traces]
    header = {"format": "polar.traces.1", "traces": json.dumps(names), "sampling": json.dumps(sampling)}
    return save(arrays, metadata=header)


def _padded(trace: Trace, values: NDArray[np.generic], fill: int) -> NDArray[np.generic]:
    return np.concatenate([np.full(len(trace.prompt_ids), fill, values.dtype), values])


def _joined(parts: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
