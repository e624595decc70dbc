"""Files that were cut or changed since they were written are refused by every reader, each change by itself."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load, save

from polar.errors import UsageError
from polar.trajectory.arrow import SCHEMA, read_table, table
from polar.trajectory.checking import forest_fault
from polar.trajectory.export import session_json
from polar.trajectory.forest import forest, join
from polar.trajectory.reading import read_json
from polar.trajectory.tensors import read_forest, read_tensors
from tests.trajectory.exports import exported
from tests.trajectory.oracle import Asked, captured, policies, sessions
from tests.trajectory.test_files import forest_tensors, grown, metadata, tensors

Changed = Callable[[NDArray[Any]], NDArray[Any]]


def put(name: str, place: int, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda row: row[name].__setitem__(place, value)


def cut(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda row: row.update({name: row[name][:-1]})


ROW_CHANGES = [
    *map(cut, ("loss_mask", "response_ids", "response_logprobs", "policy_versions")),
    put("loss_mask", 0, 0),
    put("loss_mask", 0, 2),
    put("loss_mask", 0, 300),
    put("response_ids", 0, -5),
    put("response_ids", 0, 2**40),
    put("response_logprobs", 1, 3.0),
    put("response_logprobs", 1, None),
    lambda row: row.update(weight=-0.1),
    lambda row: row.update(weight=1.1),
]


@pytest.mark.parametrize("change", ROW_CHANGES)
def test_a_changed_row_of_a_table_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    rows = table(exported(1.0)).to_pylist()
    read_table(pa.Table.from_pylist(rows, SCHEMA))
    change(rows[0])
    wide = [(f.name, pa.list_(pa.int64())) if f.type == pa.list_(pa.int32()) else (f.name, f.type) for f in SCHEMA]
    wide = [(name, pa.list_(pa.int64())) if name == "loss_mask" else (name, kind) for name, kind in wide]
    with pytest.raises(UsageError, match="as `polar export --format parquet`"):
        read_table(pa.Table.from_pylist(rows, pa.schema(wide)))


def first(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    return lambda session: change(session["trajectory"]["traces"][0])


SESSION_CHANGES = [
    *map(first, ROW_CHANGES),
    first(lambda trace: trace.update(policy_versions=[])),
    first(lambda trace: trace["policy_versions"][0].update(policy_version=2**40)),
    first(lambda trace: trace.update(reward=2.0)),
    first(lambda trace: trace.update(weight=0.1)),
    first(lambda trace: trace["metadata"]["answers"].append(99)),
    first(lambda trace: trace["metadata"].update(call_ids=[])),
    lambda session: session["trajectory"]["traces"].pop(),
    lambda session: session["trajectory"]["traces"].append(session["trajectory"]["traces"][0]),
    lambda session: session["trajectory"]["metadata"]["accounting"].update(sampled=1),
]


@pytest.mark.parametrize("change", SESSION_CHANGES)
def test_a_changed_line_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    session = json.loads(msgspec.json.encode(session_json(exported(1.0))))
    read_json(json.dumps(session))
    change(session)
    with pytest.raises(UsageError, match="as `polar export --format json`"):
        read_json(json.dumps(session))


TENSOR_CHANGES: list[tuple[str, Changed]] = [
    ("cu_seqlens", lambda bounds: bounds[:-1]),
    ("cu_seqlens", lambda bounds: np.append(bounds, bounds[-1])),
    ("cu_seqlens", lambda bounds: bounds + np.array([0, 1, 0])),
    ("loss_mask", lambda mask: mask[:-1]),
    ("loss_mask", lambda mask: mask * 2),
    ("loss_mask", np.ones_like),
    ("loss_mask", np.zeros_like),
    ("input_ids", lambda ids: ids.astype(np.float32)),
    ("input_ids", lambda ids: ids[None]),
    ("input_ids", lambda ids: -1 - ids),
    ("prompt_lengths", lambda lengths: lengths + 10_000),
    ("prompt_lengths", lambda lengths: -lengths),
    ("prompt_lengths", lambda lengths: lengths + 1),
    ("policy_versions", lambda versions: np.full_like(versions, -1)),
    ("policy_versions", lambda versions: np.full_like(versions, 1)),
    ("logprobs", lambda values: values * np.float32(np.nan)),
    ("logprobs", lambda values: -values),
    ("weights", lambda weights: weights * np.nan),
    ("rewards", lambda rewards: rewards + np.inf),
]


def changed(data: bytes, name: str, change: Changed) -> bytes:
    """The file with one array changed."""
    arrays = load(data)
    return save({**arrays, name: np.ascontiguousarray(change(arrays[name]))}, metadata(data))


@pytest.mark.parametrize(("name", "change"), TENSOR_CHANGES)
def test_a_changed_tensor_is_refused(name: str, change: Changed) -> None:
    data = tensors([exported(1.0)])
    read_tensors(changed(data, name, lambda array: array))
    with pytest.raises(UsageError, match="not as `polar export` wrote it"):
        read_tensors(changed(data, name, change))


FOREST_CHANGES: list[tuple[str, Changed]] = [
    ("bounds", lambda bounds: bounds[:-1]),
    ("bounds", lambda bounds: bounds + 1),
    ("parents", lambda parents: np.full_like(parents, 100)),
    ("parents", lambda parents: np.full_like(parents, -2)),
    ("parents", lambda parents: np.full_like(parents, -1)),
    ("positions", lambda positions: positions + 1),
    ("loss_mask", lambda mask: 1 - mask),
    ("loss_mask", lambda mask: mask[:-1]),
    ("policy_versions", lambda versions: np.full_like(versions, 1)),
    ("logprobs", lambda values: values - 1),
    ("sampled", np.zeros_like),
    ("traces", lambda traces: np.full_like(traces, -1)),
    ("samplings", lambda samplings: samplings + 50),
    ("samplings", lambda samplings: np.full_like(samplings, -1)),
    ("sessions", lambda sessions: sessions + 50),
    ("weights", lambda weights: weights * np.nan),
    ("weights", lambda weights: weights / 2),
    ("rewards", lambda rewards: rewards[:-1]),
    ("ids", lambda ids: ids.astype(np.float64)),
    ("ids", lambda ids: -1 - ids),
]


@pytest.mark.parametrize(("name", "change"), FOREST_CHANGES)
def test_a_changed_forest_is_refused(name: str, change: Changed) -> None:
    data = forest_tensors([grown("s1", "one"), grown("s2", "two")])
    read_forest(changed(data, name, lambda array: array))
    with pytest.raises(UsageError, match="not as `polar export` wrote it"):
        read_forest(changed(data, name, change))


@pytest.mark.parametrize(("name", "text"), [("calls", "["), ("sampling", "[]"), ("traces", "[[1, 2]]")])
def test_a_changed_header_is_refused(name: str, text: str) -> None:
    data = tensors([exported(1.0)])
    for texts in (metadata(data) | {name: text}, {key: value for key, value in metadata(data).items() if key != name}):
        with pytest.raises(UsageError, match="not as `polar export` wrote it"):
            read_tensors(save(load(data), texts))
    with pytest.raises(UsageError, match="`input_ids` is to be an array of int32"):
        read_tensors(save({}, metadata(data)))


@settings(max_examples=25)
@given(st.lists(sessions(5), max_size=2), policies, st.sampled_from([1.0, 0.0, None]))
def test_no_forest_of_ours_is_refused(many: list[list[Asked]], policy: Any, reward: float | None) -> None:
    forests = [forest(captured(calls, range(len(calls))), reward=reward, policy=policy) for calls in many]
    assert [forest_fault(one) for one in (*forests, join(forests))] == [""] * (len(forests) + 1)
