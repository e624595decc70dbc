"""Files for trainers: what is read back is what was written, and who else reads them finds what we say is in them."""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import datasets
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs
from safetensors.numpy import load, save

from polar.chat import ImagePart, Message, TextPart
from polar.errors import UsageError
from polar.specs import TrainingPolicy
from polar.trajectory.arrow import SCHEMA, read_table, table
from polar.trajectory.builders import build
from polar.trajectory.export import Exported
from polar.trajectory.forest import Forest, forest, join
from polar.trajectory.sft import chats
from polar.trajectory.tensors import FOREST_ARRAYS, ForestTensors, TensorFile, TraceTensors, read_forest, read_tensors
from tests.tokens.sessions import TOOLS, Conversation, Session, follow, text_message
from tests.trajectory.exports import SAMPLING, exported, result, same, told


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def parquet(sessions: Sequence[Exported]) -> bytes:
    file = io.BytesIO()
    with pq.ParquetWriter(file, SCHEMA) as writer:
        for session in sessions:
            writer.write_table(table(session))
    return file.getvalue()


def tensors(sessions: Sequence[Exported]) -> bytes:
    made, file = TensorFile(TraceTensors(), io.BytesIO), io.BytesIO()
    for session in sessions:
        made.add(session)
    made.pour(file)
    return file.getvalue()


def forest_tensors(forests: Sequence[Forest]) -> bytes:
    made, file = TensorFile(ForestTensors(), io.BytesIO), io.BytesIO()
    for one in forests:
        made.add(one)
    made.pour(file)
    return file.getvalue()


# Parquet


@pytest.mark.parametrize("reward", [1.0, 0.0, None])
def test_a_table_read_back_is_the_traces(reward: float | None) -> None:
    sessions = [exported(reward), exported(reward, 0, "empty"), exported(reward, 2, "s2")]
    read = read_table(pq.read_table(io.BytesIO(parquet(sessions))))
    flat = [(session, index, trace) for session in sessions for index, trace in enumerate(session.trajectory.traces)]
    for placed, (session, index, trace) in zip(read, flat, strict=True):
        assert (placed.session_id, placed.task_id, placed.sample, placed.index) == (session.result.session_id, "t", 2, index)
        same(placed.trace, told(trace))


def test_datasets_of_hugging_face_opens_the_table(tmp_path: Path) -> None:
    session = exported(1.0)
    (tmp_path / "traces.parquet").write_bytes(parquet([session]))
    opened = datasets.Dataset.from_parquet(str(tmp_path / "traces.parquet"), cache_dir=str(tmp_path / "cache"))
    assert len(opened) == len(session.trajectory.traces)
    for row, trace in zip(opened, session.trajectory.traces, strict=True):
        assert row["prompt_ids"] == trace.prompt_ids.tolist()
        assert np.asarray(row["response_logprobs"], np.float32).tobytes() == trace.response_logprobs.tobytes()
        assert {name: row[name] for name in SAMPLING} == SAMPLING
    for placed, trace in zip(read_table(opened.data.table), session.trajectory.traces, strict=True):
        same(placed.trace, told(trace))


def test_another_table_is_refused() -> None:
    for other in (pa.table({"text": ["a"]}), table(exported(1.0)).set_column(20, "prompt_messages", pa.array(["no json"] * 2))):
        with pytest.raises(UsageError, match="polar export --format parquet"):
            read_table(other)


# Tensors


@pytest.mark.parametrize("reward", [0.1, None])
def test_tensors_read_back_are_the_traces_without_their_words(reward: float | None) -> None:
    sessions = [exported(reward), exported(reward, 0, "empty"), exported(reward, 2, "s2")]
    read = read_tensors(tensors(sessions))
    flat = [(session, index, trace) for session in sessions for index, trace in enumerate(session.trajectory.traces)]
    for placed, (session, index, trace) in zip(read, flat, strict=True):
        assert (placed.session_id, placed.task_id, placed.sample, placed.index) == (session.result.session_id, "t", 2, index)
        same(placed.trace, replace(trace, prompt_messages=(), response_messages=(), tools=(), answers=()))


def test_tensors_are_laid_out_as_their_document_says() -> None:
    sessions = [exported(0.5), exported(0.5, 2, "s2")]
    data = tensors(sessions)
    arrays, header = load(data), metadata(data)
    traces = [trace for session in sessions for trace in session.trajectory.traces]
    assert json.loads(header["traces"]) == [["s1", "t", 2, 0], ["s1", "t", 2, 1], ["s2", "t", 2, 0], ["s2", "t", 2, 1]]
    assert json.loads(header["sampling"]) == [SAMPLING] * len(traces)
    ids = [token for trace in traces for token in (*trace.prompt_ids.tolist(), *trace.response_ids.tolist())]
    assert arrays["input_ids"].tolist() == ids
    untrained = arrays["loss_mask"] == 0
    assert not arrays["logprobs"][untrained].any()
    assert ((arrays["policy_versions"] == -1) == untrained).all()
    assert (arrays["rewards"] == 0.5).all()
    assert arrays["weights"].sum() == pytest.approx(2.0)
    assert {name: str(array.dtype) for name, array in arrays.items()} == {
        "input_ids": "int32",
        "loss_mask": "uint8",
        "logprobs": "float32",
        "policy_versions": "int32",
        "cu_seqlens": "int64",
        "prompt_lengths": "int32",
        "rewards": "float64",
        "weights": "float64",
    }
    assert math.isnan(load(tensors([exported(None)]))["rewards"][0])


def metadata(data: bytes) -> dict[str, str]:
    """The text header of a safetensors file."""
    header: dict[str, str] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    return header


def test_nothing_is_exported_as_nothing() -> None:
    for sessions in ([], [exported(1.0, 0)]):
        assert read_table(pq.read_table(io.BytesIO(parquet(sessions)))) == []
        arrays = load(tensors(sessions))
        assert arrays["cu_seqlens"].tolist() == [0]
        assert all(len(array) == 0 for name, array in arrays.items() if name != "cu_seqlens")
        assert read_tensors(tensors(sessions)) == []
    assert len(read_forest(forest_tensors([])).ids) == 0


def test_another_file_is_refused() -> None:
    of_somebody = save({"x": np.zeros(1, np.float32)})
    for data in (b"", b"nonsense", of_somebody, forest_tensors([])):
        with pytest.raises(UsageError, match=r"expected a safetensors file of polar.traces.1"):
            read_tensors(data)
    with pytest.raises(UsageError, match="got polar.traces.1"):
        read_forest(tensors([]))


# Forests


def grown(session_id: str, word: str, turns: int = 2, reward: float | None = 1.0) -> Forest:
    session, talk = Session(), Conversation([text_message("system", "brief"), text_message("user", word)], TOOLS[1])
    for turn in range(turns):
        follow(talk, session.ask(talk, text_message("assistant", f"{turn}"), versions=(1, turn)))
    session.calls = [structs.replace(call, session_id=session_id) for call in session.calls]
    return forest(session.captured(), reward=reward)


def test_a_forest_read_back_is_the_forest() -> None:
    joined = join([grown("s1", "one"), grown("s2", "one more", 3, None)])
    for one in (grown("s1", "one"), joined, join([])):
        read = read_forest(forest_tensors([one]))
        for name in FOREST_ARRAYS:
            left, right = getattr(read, name), getattr(one, name)
            assert (left.dtype, left.tobytes()) == (right.dtype, right.tobytes()), name
        assert (read.call_ids, read.sampling, read.session_ids) == (one.call_ids, one.sampling, one.session_ids)


def test_forests_of_a_file_stand_side_by_side_and_can_be_joined() -> None:
    forests = [grown("s1", "one"), grown("s2", "one more", 3), grown("s3", "other")]
    together, joined = join([read_forest(forest_tensors(forests))]), join(forests)
    assert all(np.array_equal(getattr(together, name), getattr(joined, name)) for name in FOREST_ARRAYS)
    assert (together.call_ids, together.session_ids) == (joined.call_ids, joined.session_ids)


# Chats


def test_a_chat_says_which_answers_are_trained() -> None:
    main, aside = chats(exported(0.5))
    roles = [(message["role"], message.get("weight")) for message in messages(main)]
    assert roles == [("system", None), ("user", None), *[("assistant", 1), ("tool", None)] * 2, ("assistant", 1)]
    trained = [message.get("weight") for message in messages(aside) if message["role"] == "assistant"]
    assert trained == [0, 1], "the first answer is trained in the main trace"
    assert (main["trace"], main["reward"], main["session_id"], aside["trace"]) == (0, 0.5, "s1", 1)
    assert main["trace_weight"] + aside["trace_weight"] == pytest.approx(1.0)  # type: ignore[operator]
    assert msgspec.json.decode(msgspec.json.encode(main["tools"])) == [
        {"type": "function", "function": {"name": "bash", "description": "Run it.", "parameters": {}}}
    ]


def messages(chat: dict[str, object]) -> list[dict[str, object]]:
    said: list[dict[str, object]] = msgspec.json.decode(msgspec.json.encode(chat["messages"]))
    return said


def test_the_longest_trace_stands_for_its_session() -> None:
    (chat,) = chats(exported(1.0), longest=True)
    assert chat["trace"] == 0
    assert list(chats(exported(1.0, 0), longest=True)) == []


def test_an_answer_is_told_as_it_was_sampled() -> None:
    """Reasoning that the harness dropped stands in the tokens, so it stands in the chat."""
    session, talk = Session(), Conversation([text_message("system", "brief"), text_message("user", "u")], TOOLS[1])
    reply = Message("assistant", (TextPart("a"),), "because", ())
    follow(talk, session.ask(talk, reply))
    talk.messages[2] = structs.replace(talk.messages[2], reasoning="")
    session.ask(talk, text_message("assistant", "b"))
    trajectory = build(session.captured(), builder="prefix_merging", status="completed", reward=1.0)
    (chat,) = chats(Exported(result(trajectory, 1.0, "s1"), trajectory))
    assert messages(chat)[2] == {"role": "assistant", "content": "a", "reasoning_content": "because", "weight": 1}


def test_a_rewritten_answer_is_not_trained_in_the_chat_that_rewrote_it() -> None:
    session, talk = Session(), Conversation([text_message("system", "brief"), text_message("user", "u")], TOOLS[1])
    follow(talk, session.ask(talk, text_message("assistant", "one two")))
    talk.messages[2] = text_message("assistant", "one TWO")
    session.ask(talk, text_message("assistant", "three"))
    trajectory = build(session.captured(), builder="prefix_merging", status="completed", reward=1.0)
    old, fork = chats(Exported(result(trajectory, 1.0, "s1"), trajectory))
    assert [message["weight"] for message in messages(fork) if message["role"] == "assistant"] == [0, 1]
    assert messages(old)[-1]["content"] == "one two"


def test_images_stay_images() -> None:
    session = Session()
    talk = Conversation([Message("user", (TextPart("See"), ImagePart("image/png", "AAAA")))])
    session.ask(talk, text_message("assistant", "a"))
    trajectory = build(session.captured(), builder="prefix_merging", status="completed", reward=1.0)
    (chat,) = chats(Exported(result(trajectory, 1.0, "s1"), trajectory))
    assert messages(chat)[0]["content"] == [
        {"type": "text", "text": "See"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]


def test_datasets_of_hugging_face_opens_the_chats(tmp_path: Path) -> None:
    lines = [msgspec.json.encode(chat) for chat in chats(exported(1.0))]
    (tmp_path / "sft.jsonl").write_bytes(b"\n".join(lines))
    opened = datasets.Dataset.from_json(str(tmp_path / "sft.jsonl"), cache_dir=str(tmp_path / "cache"))
    assert [len(row["messages"]) for row in opened] == [len(msgspec.json.decode(line)["messages"]) for line in lines]
    assert [message["weight"] for message in opened[0]["messages"] if message["role"] == "assistant"] == [1, 1, 1]


def test_the_policy_of_training_decides_what_a_file_holds() -> None:
    session, talk = Session(), Conversation([text_message("user", "u")])
    follow(talk, session.ask(talk, text_message("assistant", "a")))
    session.ask(talk, text_message("assistant", "cut"), status="aborted")
    for policy, calls in ((TrainingPolicy(), 1), (TrainingPolicy(aborted="train"), 2)):
        trajectory = build(session.captured(), builder="prefix_merging", status="completed", reward=1.0, policy=policy)
        read = read_tensors(tensors([Exported(result(trajectory, 1.0, "s1"), trajectory)]))
        assert sum(len(placed.trace.call_ids) for placed in read) == calls
