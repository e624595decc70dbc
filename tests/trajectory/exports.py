"""Sessions to export, and what of their traces a file tells."""

from dataclasses import fields, replace

import numpy as np

from polar.chat import Message, TextPart, ToolCall
from polar.specs import SessionResult, Timing, Trace, TrainingPolicy, Trajectory
from polar.trajectory.builders import build
from polar.trajectory.exclusion import PLAIN
from polar.trajectory.export import Exported
from polar.trajectory.reading import told_message, told_tool
from tests.tokens.sessions import TOOLS, Conversation, Session, follow, text_message

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "logprobs_mode": "raw"}
UNICODE = "日本 \u2028 \x00 \u00e9 \U0001f600"


def exported(reward: float | None, turns: int = 3, session_id: str = "s1", policy: TrainingPolicy = PLAIN) -> Exported:
    """A session with a main conversation and a sub-agent that left it."""
    session = Session()
    talk = Conversation([text_message("system", "brief"), text_message("user", UNICODE)], TOOLS[1])
    aside: Conversation | None = None
    for turn in range(turns):
        reply = Message("assistant", (TextPart(f"{UNICODE} {turn}"),), "", (ToolCall("", "bash", '{"a": 1}'),))
        follow(talk, session.ask(talk, reply, versions=(1, 2, turn)))
        aside = aside or Conversation(list(talk.messages), talk.tools, "subagent")
    if aside:
        session.ask(aside, text_message("assistant", "aside"))
    trajectory = build(session.captured(), builder="prefix_merging", status="completed", reward=reward, policy=policy)
    return Exported(result(trajectory, reward, session_id), trajectory)


def result(trajectory: Trajectory, reward: float | None, session_id: str) -> SessionResult:
    return SessionResult(
        session_id,
        "t",
        2,
        "completed",
        reward,
        4,
        len(trajectory.traces),
        trajectory.accounting,
        Timing(running=1.5),
        sandbox="process",
        metadata={"split": "train"},
    )


def told(trace: Trace) -> Trace:
    """The trace with messages and tools as files tell them."""
    return replace(
        trace,
        prompt_messages=tuple(map(told_message, trace.prompt_messages)),
        response_messages=tuple(map(told_message, trace.response_messages)),
        tools=tuple(map(told_tool, trace.tools)),
    )


def same(one: Trace, other: Trace) -> None:
    """Two traces are equal in every field, and arrays to their type and last bit."""
    for field in fields(Trace):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(right, np.ndarray):
            assert (left.dtype, left.tobytes()) == (right.dtype, right.tobytes()), field.name
        else:
            assert left == right, field.name
