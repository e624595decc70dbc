"""The published JSON: its shape, and that it comes back as it was."""

import json

import msgspec
import numpy as np
import pytest
from msgspec import Raw, structs

from polar.chat import ImagePart, Message, TextPart, Tool, ToolCall
from polar.errors import UsageError
from polar.specs import TrainingPolicy, Trajectory
from polar.trajectory.export import Exported, message_json, session_json, token_versions, tool_json
from polar.trajectory.reading import read_json, told_message, told_tool
from tests.trajectory.exports import SAMPLING, UNICODE, exported, same, told


@pytest.mark.parametrize("reward", [1.0, 0.0, -0.25, None])
def test_json_has_the_published_shape_and_keeps_every_number(reward: float | None) -> None:
    session = exported(reward)
    body = json.loads(msgspec.json.encode(session_json(session)))
    assert set(body) == {"session_id", "task_id", "status", "trajectory", "timing", "node_id", "error", "metadata"}
    assert set(body["trajectory"]) == {"status", "traces", "metadata", "error"}
    assert (body["error"], body["metadata"]["sample"], body["metadata"]["reward"]) == (None, 2, reward)
    assert set(body["trajectory"]["metadata"]["accounting"]) == {"sampled", "trained", "excluded"}
    for line, trace in zip(body["trajectory"]["traces"], session.trajectory.traces, strict=True):
        assert set(line) == set(
            "prompt_ids response_ids loss_mask response_logprobs prompt_messages response_messages tools finish_reason reward "
            "metadata policy_versions weight branch".split()
        )
        for name in ("prompt_ids", "response_ids", "loss_mask", "response_logprobs"):
            array = getattr(trace, name)
            assert np.asarray(line[name], array.dtype).tobytes() == array.tobytes()
        assert line["reward"] == reward
        assert line["prompt_messages"][1] == {"role": "user", "content": UNICODE}
        assert line["tools"][0]["function"]["parameters"] == {}
        assert line["metadata"] == {"call_ids": list(trace.call_ids), "answers": list(trace.answers), **SAMPLING}
        assert sum(span["end"] - span["start"] for span in line["policy_versions"]) == sum(line["loss_mask"])
    assert [line["branch"] for line in body["trajectory"]["traces"]] == [
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
    assert message_json(Message("tool", (TextPart("no such file"),), tool_call_id="call_1", is_error=True))["is_error"] is True
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


@pytest.mark.parametrize("reward", [1.0, 0.0, -0.25, None])
def test_a_line_read_back_is_the_session(reward: float | None) -> None:
    session = exported(reward)
    read = read_json(msgspec.json.encode(session_json(session)))
    assert read.result == session.result
    assert structs_of(read.trajectory) == structs_of(session.trajectory)
    for trace, before in zip(read.trajectory.traces, session.trajectory.traces, strict=True):
        same(trace, told(before))


def structs_of(trajectory: Trajectory) -> list[object]:
    """All of a trajectory but its traces."""
    named = ("status", "accounting", "builder", "findings", "error", "policy")
    return [getattr(trajectory, name) for name in named]


def test_metadata_of_a_task_never_stands_for_what_polar_says() -> None:
    session = exported(1.0)
    shadowed = Exported(structs.replace(session.result, metadata={"reward": "99", "mine": "kept"}), session.trajectory)
    read = read_json(msgspec.json.encode(session_json(shadowed)))
    assert (read.result.reward, read.result.metadata) == (1.0, {"mine": "kept"})


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b'{"session_id": 1}', b"nonsense"])
def test_what_is_no_line_of_ours_is_refused(line: bytes) -> None:
    with pytest.raises(UsageError, match="polar export --format json"):
        read_json(line)


def test_a_line_that_lacks_what_we_add_is_refused() -> None:
    body = session_json(exported(1.0))
    body["metadata"] = {"sample": 1}
    with pytest.raises(UsageError, match="polar export --format json"):
        read_json(msgspec.json.encode(body))


def test_what_comes_back_of_a_message() -> None:
    """Texts are one text, and identifiers of ours are not told; all else stays, images as they were sent."""
    call = ToolCall("call_1", "bash", '{"a": 1}')
    message = Message("assistant", (TextPart("a"), TextPart("b")), "why", (call,), minted=("msg_1",))
    assert told_message(message) == Message("assistant", (TextPart("ab"),), "why", (call,))
    assert told_message(Message("user", (TextPart(""),))) == Message("user")
    failed = Message("tool", (TextPart("x"),), tool_call_id="call_1", is_error=True)
    assert told_message(failed) == failed
    seen = Message("user", (TextPart("Look:"), ImagePart("image/png", "AAAA"), ImagePart(url="https://x/y.png"), TextPart("!")))
    assert told_message(seen) == seen
    assert message_json(seen)["content"] == [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
        {"type": "text", "text": "!"},
    ]


def test_what_comes_back_of_a_tool() -> None:
    schema = Raw(b'{"z":1,"a":12345678901234567890123}')
    kept = told_tool(Tool("crm__find", "Find.", schema, namespace="crm", custom=True))
    assert (kept.name, kept.description, bytes(kept.parameters)) == ("crm__find", "Find.", bytes(schema))


def test_the_policy_of_training_is_told() -> None:
    session = exported(1.0, policy=TrainingPolicy(truncated="exclude"))
    assert json.loads(msgspec.json.encode(session_json(session)))["trajectory"]["metadata"]["policy"] == {
        "auxiliary": "exclude",
        "aborted": "exclude",
        "superseded": "exclude",
        "truncated": "exclude",
    }
