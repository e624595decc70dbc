"""Trajectories as others read them: JSON in the published shape (`arrow` has tables, `tensors` flat arrays, `sft` chats).

Everything here makes values or bytes; who asked writes the file. `reading` reads them back.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

from polar.chat import ImagePart, Message, Part, Tool
from polar.specs import Int32Array, SessionResult, Trace, Trajectory


@dataclass(frozen=True)
class Exported:
    """A finished session with its traces."""

    result: SessionResult
    trajectory: Trajectory


@dataclass(frozen=True)
class Placed:
    """A trace that was read back, and where it belongs: trace number `index` of its session."""

    session_id: str
    task_id: str
    sample: int
    index: int
    trace: Trace


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
        "metadata": {
            **result.metadata,
            "sample": result.sample,
            "reward": result.reward,
            "sandbox": result.sandbox,
            "calls": result.calls,
            "error_kind": result.error_kind,
        },
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
            "policy": msgspec.to_builtins(trajectory.policy),
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
        "metadata": {"call_ids": list(trace.call_ids), "answers": list(trace.answers), **sampling_json(trace)},
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
    """A message in the shape of OpenAI Chat; only where it has an image is its content a list."""
    images = any(isinstance(part, ImagePart) for part in message.content)
    body: dict[str, object] = {
        "role": message.role,
        "content": [_part_json(part) for part in message.content] if images else message.text,
    }
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    if message.is_error:
        body["is_error"] = True
    return body


def _part_json(part: Part) -> dict[str, object]:
    if isinstance(part, ImagePart):
        return {"type": "image_url", "image_url": {"url": part.url or f"data:{part.media_type};base64,{part.data}"}}
    return {"type": "text", "text": part.text}


def tool_json(tool: Tool) -> dict[str, object]:
    """A tool in the shape of OpenAI Chat."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def token_versions(trace: Trace) -> Int32Array:
    """Policy version of each response token, -1 where the token is not trained; int32[r]."""
    trained = np.full(int(trace.loss_mask.sum()), -1, np.int32)
    for span in trace.policy_versions:
        trained[span.start : span.end] = span.policy_version
    versions = np.full(len(trace.response_ids), -1, np.int32)
    versions[trace.loss_mask.astype(bool)] = trained
    return versions
