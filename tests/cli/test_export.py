"""`polar export`: what others read is what the builders made."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from polar.cli.export import replacing
from polar.cli.runs import Run
from polar.errors import StoreError
from polar.rollout.folder import RunFolder
from polar.specs import Trace
from polar.store.captured import read_captured
from polar.trajectory.builders import build
from tests.cli.conftest import Polar


def traces(run: RunFolder) -> list[Trace]:
    """All traces, straight from the store."""
    return [
        trace
        for result in Run.read(run.path).results
        for trace in build(
            read_captured(run.capture, result.session_id), builder="prefix_merging", status=result.status, reward=result.reward
        ).traces
    ]


def ids(trace: Trace) -> list[int]:
    return [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]


def test_json_lines(polar: Polar, run: RunFolder) -> None:
    told = polar("export", run.path, "--format", "json", "--out", "out.jsonl")
    assert told.exit_code == 0
    sessions = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [(session["task_id"], session["status"]) for session in sessions] == [
        ("files", "completed"),
        ("files", "completed"),
        ("cuts", "timed_out"),
        ("cuts", "failed"),
    ]
    read: list[Any] = [trace for session in sessions for trace in session["trajectory"]["traces"]]
    assert [trace["prompt_ids"] + trace["response_ids"] for trace in read] == [ids(trace) for trace in traces(run)]
    for trace, expected in zip(read, traces(run), strict=True):
        assert np.array(trace["response_logprobs"], np.float32).tobytes() == expected.response_logprobs.tobytes()
        assert trace["loss_mask"] == expected.loss_mask.tolist()


def test_parquet(polar: Polar, run: RunFolder) -> None:
    assert polar("export", run.path, "--format", "parquet").exit_code == 0
    rows = pq.read_table(run.path / "traces.parquet").to_pylist()
    assert [row["prompt_ids"] + row["response_ids"] for row in rows] == [ids(trace) for trace in traces(run)]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.0, 0.0]
    assert sum(row["weight"] for row in rows) == pytest.approx(3.0)


def test_safetensors(polar: Polar, run: RunFolder) -> None:
    assert polar("export", run.path, "--format", "safetensors").exit_code == 0
    with safe_open(run.path / "traces.safetensors", "numpy") as file:
        flat, bounds = file.get_tensor("input_ids"), file.get_tensor("cu_seqlens").tolist()
        names = json.loads(file.metadata()["traces"])
    assert [flat[start:end].tolist() for start, end in pairwise(bounds)] == [ids(t) for t in traces(run)]
    assert [name[1:] for name in names] == [["files", 0, 0], ["files", 1, 0], ["files", 1, 1], ["cuts", 0, 0]]


def test_it_says_what_it_wrote_and_where(polar: Polar, run: RunFolder) -> None:
    told = polar("export", run.path, "--format", "json").output
    held = sum(len(ids(trace)) for trace in traces(run))
    trained = sum(int(trace.loss_mask.sum()) for trace in traces(run))
    assert told == f"{run.path}/traces.jsonl: 4 sessions, 4 traces, {held:,} tokens, {trained:,} under the mask\n"


def test_only_completed_sessions(polar: Polar, run: RunFolder) -> None:
    assert "2 sessions, 3 traces" in polar("export", run.path, "--format", "json", "--only", "completed").output


def test_another_builder(polar: Polar, run: RunFolder) -> None:
    assert "4 sessions, 8 traces" in polar("export", run.path, "--format", "json", "--builder", "per_request").output


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "traces.jsonl"
    target.write_text("before")
    with pytest.raises(TypeError), replacing(target) as file:
        file.write(b"half" + None)  # type: ignore[operator]
    assert (target.read_text(), list(tmp_path.iterdir())) == ("before", [target])


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot write .*: No such file"), replacing(tmp_path / "nowhere" / "x"):
        pass
