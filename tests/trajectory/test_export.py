"""What others read: the published JSON, the table, the tensors."""

import io
import json
import math
import struct

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from msgspec import Raw
from safetensors.numpy import load

from polar.chat import Message, TextPart, Tool, ToolCall
from polar.specs import SessionResult, Timing, Trajectory
from polar.trajectory.arrow import table
from polar.trajectory.builders import build
from polar.trajectory.export import Exported, message_json, session_json, tensors, token_versions, tool_json
from tests.tokens.sessions import TOOLS, Conversation, Session, follow, text_message

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "logprobs_mode": "raw"}
UNICODE = "日本 \u2028 \x00 \u00e9 \U0001f600"


def exported(reward: float | None, turns: int = 3, session_id: str = "s1") -> Exported:
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
    trajectory = build(session.captured(), builder="prefix_merging", status="completed", reward=reward)
    return Exported(result(trajectory, reward, session_id), trajectory)


def result(trajectory: Trajectory, reward: float | None, session_id: str) -> SessionResult:
    return SessionResult(
        session_id, "t", 2, "completed", reward, 4, len(trajectory.traces), trajectory.accounting, Timing(running=1.5)
    )


@pytest.mark.parametrize("reward", [1.0, 0.0, -0.25, None])
def test_json_has_the_published_shape_and_keeps_every_number(reward: float | None) -> None:
    session = exported(reward)
    body = json.loads(msgspec.json.encode(session_json(session)))
    assert set(body) == {"session_id", "task_id", "status", "trajectory", "timing", "node_id", "error", "metadata"}
    assert set(body["trajectory"]) == {"status", "traces", "metadata", "error"}
    assert (body["error"], body["metadata"]["sample"], body["metadata"]["reward"]) == (None, 2, reward)
    assert set(body["trajectory"]["metadata"]["accounting"]) == {"sampled", "trained", "excluded"}
    for told, trace in zip(body["trajectory"]["traces"], session.trajectory.traces, strict=True):
        assert set(told) == set(
            "prompt_ids response_ids loss_mask response_logprobs prompt_messages response_messages tools finish_reason reward "
            "metadata policy_versions weight branch".split()
        )
        for name in ("prompt_ids", "response_ids", "loss_mask", "response_logprobs"):
            array = getattr(trace, name)
            assert np.asarray(told[name], array.dtype).tobytes() == array.tobytes()
        assert told["reward"] == reward
        assert told["prompt_messages"][1] == {"role": "user", "content": UNICODE}
        assert told["tools"][0]["function"]["parameters"] == {}
        assert told["metadata"] == {"call_ids": list(trace.call_ids), **SAMPLING}
        assert sum(span["end"] - span["start"] for span in told["policy_versions"]) == sum(told["loss_mask"])
    assert [told["branch"] for told in body["trajectory"]["traces"]] == [
        {"kind": "agent", "parent_trace": None},
        {"kind": "subagent", "parent_trace": 0},
    ]


def test_messages_and_tools_are_written_as_openai_writes_them() -> None:
    call = ToolCall("call_1", "bash", '{"a": 1}')
    assert message_json(Message("assistant", (TextPart("a"), TextPart("b")), "why", (call,))) == {
        "role": "assistant",
        "content": "ab",
        "reasoning_content": "why",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"a": 1}'}}],
    }
    assert message_json(Message("tool", (), tool_call_id="call_1")) == {"role": "tool", "content": "", "tool_call_id": "call_1"}
    schema = Raw(b'{"z": 1,  "a": 12345678901234567890123}')
    written = msgspec.json.encode(tool_json(Tool("bash", "Run.", schema)))
    assert bytes(schema) in written


def test_the_version_of_each_token_is_minus_one_where_it_is_not_trained() -> None:
    trace = exported(1.0).trajectory.traces[0]
    versions = token_versions(trace)
    assert ((versions == -1) == (trace.loss_mask == 0)).all()
    expected = [span.policy_version for span in trace.policy_versions for _ in range(span.start, span.end)]
    assert versions[trace.loss_mask == 1].tolist() == expected
    assert len(set(expected)) == 3


@pytest.mark.parametrize("reward", [1.0, None])
def test_a_table_survives_parquet(reward: float | None) -> None:
    sessions = [exported(reward), exported(reward, 2, "s2")]
    file = io.BytesIO()
    pq.write_table(table(sessions), file)
    rows = pq.read_table(io.BytesIO(file.getvalue())).to_pylist()
    flat = [(session, index, trace) for session in sessions for index, trace in enumerate(session.trajectory.traces)]
    assert len(rows) == len(flat) == 4
    for row, (session, index, trace) in zip(rows, flat, strict=True):
        assert (row["session_id"], row["trace"], row["reward"]) == (session.result.session_id, index, reward)
        assert row["parent_trace"] == trace.branch.parent_trace
        assert {name: row[name] for name in SAMPLING} == SAMPLING
        for name in ("prompt_ids", "response_ids", "loss_mask", "response_logprobs"):
            array = getattr(trace, name)
            assert np.asarray(row[name], array.dtype).tobytes() == array.tobytes()
        assert row["policy_versions"] == token_versions(trace).tolist()
        assert json.loads(row["prompt_messages"])[1]["content"] == UNICODE


@pytest.mark.parametrize("reward", [0.5, None])
def test_tensors_can_be_cut_back_into_traces(reward: float | None) -> None:
    sessions = [exported(reward), exported(reward, 2, "s2")]
    data = tensors(sessions)
    arrays, names = load(data), json.loads(metadata(data)["traces"])
    traces = [trace for session in sessions for trace in session.trajectory.traces]
    assert json.loads(metadata(data)["sampling"]) == [SAMPLING] * len(traces)
    assert names == [["s1", "t", 2, 0], ["s1", "t", 2, 1], ["s2", "t", 2, 0], ["s2", "t", 2, 1]]
    assert len(arrays["cu_seqlens"]) == len(traces) + 1
    for number, trace in enumerate(traces):
        start, end = arrays["cu_seqlens"][number : number + 2]
        prompt = int(arrays["prompt_lengths"][number])
        cut = {name: arrays[name][start:end] for name in ("input_ids", "loss_mask", "logprobs", "policy_versions")}
        assert cut["input_ids"].tolist() == [*trace.prompt_ids, *trace.response_ids]
        assert cut["loss_mask"][prompt:].tolist() == trace.loss_mask.tolist()
        assert cut["logprobs"][prompt:].tobytes() == trace.response_logprobs.tobytes()
        assert cut["policy_versions"][prompt:].tolist() == token_versions(trace).tolist()
        assert not cut["loss_mask"][:prompt].any()
        assert not cut["logprobs"][:prompt].any()
        assert (cut["policy_versions"][:prompt] == -1).all()
    assert math.isnan(arrays["rewards"][0]) if reward is None else (arrays["rewards"] == np.float32(reward)).all()
    assert arrays["weights"].sum() == (0 if reward is None else pytest.approx(2.0))
    types = {name: str(array.dtype) for name, array in arrays.items()}
    assert types == {
        "input_ids": "int32",
        "loss_mask": "uint8",
        "logprobs": "float32",
        "policy_versions": "int32",
        "cu_seqlens": "int64",
        "prompt_lengths": "int32",
        "rewards": "float32",
        "weights": "float32",
    }


def metadata(data: bytes) -> dict[str, str]:
    """The text header of a safetensors file."""
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    return header


def test_nothing_is_exported_as_nothing() -> None:
    empty = exported(1.0, 0)
    for sessions in ([], [empty]):
        assert table(sessions).num_rows == 0
        assert table(sessions).schema == table([exported(1.0)]).schema
        arrays = load(tensors(sessions))
        assert arrays["cu_seqlens"].tolist() == [0]
        assert all(len(array) == 0 for name, array in arrays.items() if name != "cu_seqlens")
    assert session_json(empty)["trajectory"]["traces"] == []  # type: ignore[index]
