"""Sessions, messages and tools read back from exported JSON (`arrow` reads tables back, `tensors` tensors).

A file tells messages and tools in the shape of OpenAI Chat, which lacks some of the pivot: what comes back is what `told_message`
and `told_tool` keep.
"""

import re

import msgspec
import numpy as np
from msgspec import Raw, Struct, structs

from polar.chat import ImagePart, Message, Part, Role, TextPart, Tool, ToolCall
from polar.errors import UsageError
from polar.specs import (
    Accounting,
    Branch,
    Finding,
    SessionResult,
    SessionStatus,
    Timing,
    Trace,
    TrainingPolicy,
    Trajectory,
    VersionSpan,
)
from polar.trajectory.checking import trajectory_fault
from polar.trajectory.export import Exported, message_json, tool_json

DATA_URL = re.compile(r"data:([^;,]*);base64,(.*)", re.DOTALL)


class _Text(Struct, tag="text"):
    text: str


class _Url(Struct):
    url: str


class _Image(Struct, tag="image_url"):
    image_url: _Url


class _Function(Struct):
    name: str
    arguments: str = ""
    description: str = ""
    parameters: Raw = Raw(b"{}")


class _Call(Struct):
    id: str
    function: _Function


class _Message(Struct):
    role: Role
    content: str | list[_Text | _Image]
    reasoning_content: str = ""
    tool_calls: tuple[_Call, ...] = ()
    tool_call_id: str = ""
    is_error: bool = False


class _Tool(Struct):
    function: _Function


class _TraceMetadata(Struct):
    call_ids: tuple[str, ...]
    answers: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int
    logprobs_mode: str


class _Trace(Struct):
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    response_logprobs: list[float]
    prompt_messages: list[_Message]
    response_messages: list[_Message]
    tools: list[_Tool]
    finish_reason: str
    reward: float | None
    metadata: _TraceMetadata
    policy_versions: tuple[VersionSpan, ...]
    weight: float
    branch: Branch


class _TrajectoryMetadata(Struct):
    accounting: Accounting
    builder: str
    findings: tuple[Finding, ...]
    policy: TrainingPolicy


class _Trajectory(Struct):
    status: SessionStatus
    traces: list[_Trace]
    metadata: _TrajectoryMetadata
    error: str | None


class _Session(Struct):
    session_id: str
    task_id: str
    status: SessionStatus
    trajectory: _Trajectory
    timing: Timing
    error: str | None
    metadata: dict[str, str | int | float | None]


_session = msgspec.json.Decoder(_Session).decode
_messages = msgspec.json.Decoder(list[_Message]).decode
_tools = msgspec.json.Decoder(list[_Tool]).decode


def read_json(line: bytes | str) -> Exported:
    """A session from a line of JSON. What its result counts is what its traces have.

    Raises:
        UsageError: it is no such line, or was cut or changed.
    """
    try:
        said = _session(line)
        exported = Exported(_result(said), _trajectory(said.trajectory))
    except (msgspec.MsgspecError, KeyError, TypeError, OverflowError) as error:
        raise UsageError(f"expected a session as `polar export --format json` writes it: {error}") from None
    if fault := trajectory_fault(exported.trajectory, exported.result.reward):
        raise UsageError(f"session {exported.result.session_id} is not as `polar export --format json` wrote it: {fault}")
    return exported


def _result(said: _Session) -> SessionResult:
    metadata = dict(said.metadata)
    sample, reward, sandbox, calls, kind = (metadata.pop(name) for name in ("sample", "reward", "sandbox", "calls", "error_kind"))
    return SessionResult(
        session_id=said.session_id,
        task_id=said.task_id,
        sample=msgspec.convert(sample, int),
        status=said.status,
        reward=msgspec.convert(reward, float | None),
        calls=msgspec.convert(calls, int),
        traces=len(said.trajectory.traces),
        accounting=said.trajectory.metadata.accounting,
        timing=said.timing,
        findings=said.trajectory.metadata.findings,
        error=said.error or "",
        error_kind=msgspec.convert(kind, str),
        sandbox=msgspec.convert(sandbox, str),
        metadata=msgspec.convert(metadata, dict[str, str]),
    )


def _trajectory(said: _Trajectory) -> Trajectory:
    about = said.metadata
    traces = tuple(_trace(trace) for trace in said.traces)
    return Trajectory(said.status, traces, about.accounting, about.builder, about.findings, said.error or "", about.policy)


def _trace(said: _Trace) -> Trace:
    return Trace(
        prompt_ids=np.asarray(said.prompt_ids, np.int32),
        response_ids=np.asarray(said.response_ids, np.int32),
        loss_mask=np.asarray(said.loss_mask, np.uint8),
        response_logprobs=np.asarray(said.response_logprobs, np.float32),
        policy_versions=said.policy_versions,
        prompt_messages=tuple(map(_message, said.prompt_messages)),
        response_messages=tuple(map(_message, said.response_messages)),
        tools=tuple(map(_tool, said.tools)),
        finish_reason=said.finish_reason,
        reward=said.reward,
        weight=said.weight,
        branch=said.branch,
        **structs.asdict(said.metadata),
    )


def read_messages(text: str | bytes) -> tuple[Message, ...]:
    """Messages from a JSON list. Raises `msgspec.MsgspecError`."""
    return tuple(map(_message, _messages(text)))


def read_tools(text: str | bytes) -> tuple[Tool, ...]:
    """Tools from a JSON list. Raises `msgspec.MsgspecError`."""
    return tuple(map(_tool, _tools(text)))


def told_message(message: Message) -> Message:
    """A message as a file tells it: its texts as one where it has no image, and without identifiers of ours."""
    return _message(msgspec.convert(message_json(message), _Message))


def told_tool(tool: Tool) -> Tool:
    """A tool as a file tells it: as the policy is told."""
    return _tool(msgspec.json.decode(msgspec.json.encode(tool_json(tool)), type=_Tool))


def _message(said: _Message) -> Message:
    calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in said.tool_calls)
    if isinstance(said.content, str):
        content: tuple[Part, ...] = (TextPart(said.content),) if said.content else ()
    else:
        content = tuple(map(_part, said.content))
    return Message(said.role, content, said.reasoning_content, calls, said.tool_call_id, said.is_error)


def _part(said: _Text | _Image) -> Part:
    if isinstance(said, _Text):
        return TextPart(said.text)
    found = DATA_URL.fullmatch(said.image_url.url)
    return ImagePart(found[1], found[2]) if found else ImagePart(url=said.image_url.url)


def _tool(said: _Tool) -> Tool:
    return Tool(said.function.name, said.function.description, said.function.parameters)
