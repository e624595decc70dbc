"""A stored session as the builders and the audit take it, and its traces."""

from contextlib import closing
from pathlib import Path

import msgspec

from polar.chat import Message, Tool
from polar.errors import StoreError
from polar.specs import BuilderName, SessionResult, TrainingPolicy, Trajectory
from polar.store.capture import CaptureReader
from polar.trajectory.builders import Captured, build
from polar.trajectory.exclusion import PLAIN
from polar.trajectory.forest import Forest, forest


def read_captured(path: Path, session_id: str) -> Captured:
    """Everything that a capture file holds of one session.

    Raises:
        UsageError: the session is not in the file.
        StoreError: the file cannot be read, or something that a call names is missing in it.
    """
    with closing(CaptureReader.open(path)) as reader:
        return captured(reader, session_id)


def captured(reader: CaptureReader, session_id: str) -> Captured:
    """As `read_captured`, from an open reader."""
    reader.session(session_id)
    try:
        calls, nodes = reader.calls(session_id), reader.nodes(session_id)
    except (LookupError, ValueError) as error:  # a row that another one needs is gone, or an array is cut
        raise StoreError(f"session {session_id} cannot be read: what is stored of it is incomplete ({error!r})") from error
    bodies = reader.messages({digest for call in calls for digest in (*call.message_hashes, call.tools_hash)})
    messages = {digest for call in calls for digest in call.message_hashes}
    tools = {call.tools_hash for call in calls}
    try:
        return Captured(
            calls,
            nodes,
            {digest: msgspec.json.decode(bodies[digest], type=Message) for digest in messages},
            {digest: msgspec.json.decode(bodies[digest], type=tuple[Tool, ...]) for digest in tools},
        )
    except msgspec.DecodeError as error:
        raise StoreError(f"a message of session {session_id} cannot be decoded: {error}") from None


def trajectory(reader: CaptureReader, result: SessionResult, builder: BuilderName, policy: TrainingPolicy = PLAIN) -> Trajectory:
    """The traces of a finished session.

    Raises:
        CaptureError: its tokens cannot be trusted.
        StoreError: as `read_captured`, or calls are missing that it ended with.
    """
    return build(
        _whole(reader, result),
        builder=builder,
        status=result.status,
        reward=result.reward,
        findings=result.own_findings,
        policy=policy,
    )


def trained_forest(reader: CaptureReader, result: SessionResult, policy: TrainingPolicy = PLAIN) -> Forest:
    """The trainable tree of a finished session.

    Raises:
        As `trajectory`.
    """
    return forest(_whole(reader, result), reward=result.reward, policy=policy)


def _whole(reader: CaptureReader, result: SessionResult) -> Captured:
    """What is stored of a session. Nothing in it tells that its last calls are gone, so the result is asked."""
    found = captured(reader, result.session_id)
    if len(found.calls) != result.calls:
        said = f"session {result.session_id} ended with {result.calls} calls, and {len(found.calls)} are stored"
        raise StoreError(f"{said}; `polar audit` says what else is damaged")
    return found
