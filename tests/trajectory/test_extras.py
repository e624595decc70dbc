"""What engines told of tokens besides, on its way to a trainer: nothing moves to another token, and what is cut is refused."""

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load, save

from polar.audit.session import audit_session
from polar.errors import CaptureError, UsageError
from polar.specs import Extras
from polar.trajectory.builders import Captured
from polar.trajectory.forest import Forest, forest, join, stacked
from polar.trajectory.tensors import ForestTensors, TensorFile, read_forest
from tests.tokens.sessions import Session, text_message
from tests.trajectory.test_builders import say, start
from tests.trajectory.test_damage import damaged
from tests.trajectory.test_forest import renamed


def told(name: str, extras: Extras) -> Captured:
    """A session of one answer of four tokens."""
    session, talk = Session(), start()
    say(session, talk, "one")
    captured = damaged(session, extras=extras)
    return Captured(renamed(session, name).calls, captured.nodes, captured.messages, captured.tools)


def masks(width: int) -> Extras:
    return {"sampling_mask": np.arange(4 * width, dtype=np.int32).reshape(4, width)}


def test_shorter_rows_and_those_of_others_are_filled_up() -> None:
    parts: list[tuple[int, Extras]] = [
        (2, {"a": np.asarray([[255], [1]], np.uint8)}),
        (1, {"b": np.ones((1, 1), np.float32)}),
        (1, {}),
    ]
    whole = stacked([*parts, (1, {"a": np.asarray([[2, 3]], np.uint8)})])
    np.testing.assert_array_equal(whole["a"], np.asarray([[255, -1], [1, -1], [-1, -1], [-1, -1], [2, 3]], np.int16), strict=True)
    np.testing.assert_array_equal(whole["b"], [[np.nan], [np.nan], [1], [np.nan], [np.nan]])


def test_rows_are_with_their_tokens_after_a_join_and_a_journey_through_a_file() -> None:
    forests = [forest(told(f"s{number}", masks(width) if width else {}), reward=1.0) for number, width in enumerate((2, 0, 3, 0))]
    for found in (join(forests), join([join(forests[:2]), join(forests[2:])]), read_forest(written(forests))):
        rows = found.extras["sampling_mask"]
        assert rows[:4, :2].tolist() == masks(2)["sampling_mask"].tolist()
        assert rows[8:12].tolist() == masks(3)["sampling_mask"].tolist()
        assert set(rows[[0, 4, 5, 6, 7, 12, 13, 14, 15], 2].tolist()) == {-1}
        assert len(rows) == int(found.loss_mask.sum()) == 16


def test_a_node_that_is_cut_keeps_each_row_with_its_token() -> None:
    session, talk = Session(), start()
    say(session, talk, "one")
    talk.messages[-2] = text_message("assistant", "only")  # leaves the first answer behind its "on"
    say(session, talk, "two")
    nodes = [
        replace(node, extras={"id": node.ids[:, None]}) if node.kind == "sampled" else node for node in session.history.tree.nodes
    ]
    captured = Captured(session.calls, nodes, session.messages, session.tools)
    found = forest(captured, reward=1.0)
    assert len(found.parents) == len(nodes) + 1, "the first answer is in two pieces"
    assert found.extras["id"][:, 0].tolist() == found.ids[found.loss_mask == 1].tolist()


def test_a_file_holds_them_as_plain_tensors() -> None:
    arrays = load(written([forest(told(name, masks(2)), reward=1.0) for name in ("s0", "s1")]))
    assert [name for name in sorted(arrays) if "." in name] == ["extras.sampling_mask.0", "extras.sampling_mask.1"]
    assert arrays["extras.sampling_mask.1"].tolist() == masks(2)["sampling_mask"].tolist()


@pytest.mark.parametrize(
    ("name", "rows"),
    [("extras.sampling_mask.1", 5), ("extras.sampling_mask.0", 9), ("extras.sampling_mask", 4), ("extras.other.1", 3)],
)
def test_a_file_whose_rows_do_not_fit_is_refused(name: str, rows: int) -> None:
    data = written([forest(told(session, masks(2)), reward=1.0) for session in ("s0", "s1")])
    header = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")])
    changed: Mapping[str, NDArray[Any]] = {**load(data), name: np.zeros((rows, 2), np.int32)}
    with pytest.raises(UsageError, match="extras"):
        read_forest(save(dict(changed), header["__metadata__"]))


def test_a_row_too_few_in_the_store_stops_the_build_and_is_found_by_the_audit() -> None:
    captured = told("s", {"routed_experts": np.zeros((3, 2, 2), np.uint8)})
    with pytest.raises(CaptureError, match="routed_experts is not told of each of its tokens"):
        forest(captured, reward=1.0)
    assert "T08" in {finding.code for finding in audit_session(captured, None, None)}


def written(forests: list[Forest]) -> bytes:
    tensors, file = TensorFile(ForestTensors(), io.BytesIO), io.BytesIO()
    for one in forests:
        tensors.add(one)
    tensors.pour(file)
    return file.getvalue()
