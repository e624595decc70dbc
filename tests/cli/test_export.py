"""`polar export`: what others read is what the builders made."""

import json
import weakref
from importlib import import_module
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
from polar.specs import BuilderName, SessionResult, Trace, TrainingPolicy, Trajectory
from polar.store.capture import CaptureReader
from polar.store.captured import read_captured, trajectory
from polar.trajectory.arrow import read_table
from polar.trajectory.builders import build
from polar.trajectory.reading import read_json
from polar.trajectory.tensors import read_forest, read_tensors
from tests.audit.damage import CUT, REWRITE, WORK, Damage
from tests.cli.conftest import Polar
from tests.trajectory.exports import same, told
from tests.trajectory.forests import sequences


def traces(run: RunFolder) -> list[Trace]:
    """All traces of scored sessions, straight from the store."""
    return [
        trace
        for result in Run.read(run.path).results
        if result.reward is not None
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
    trained = sum(result.accounting.trained for result in Run.read(run.path).results)
    assert told == (
        f"{run.path}/traces.jsonl: 3 sessions, 4 traces, {held:,} tokens, {trained:,} under the mask; "
        "1 sessions without a reward left out\n"
    )


def test_what_has_no_reward_is_in_no_file(polar: Polar, run: RunFolder) -> None:
    """A session that was sampled whole, and then lost its reward to infrastructure, has nothing under a mask."""
    Damage(run).result(WORK, reward=None)
    told = polar("export", run.path, "--format", "parquet").output
    assert "2 sessions, 3 traces" in told
    assert "2 sessions without a reward left out" in told
    rows = pq.read_table(run.path / "traces.parquet").to_pylist()
    assert None not in [row["reward"] for row in rows]


def test_nothing_with_a_reward_is_wrong_usage(polar: Polar, run: RunFolder) -> None:
    for session in (WORK, REWRITE, CUT):
        Damage(run).result(session, reward=None)
    told = polar("export", run.path, "--format", "json")
    assert told.exit_code == 2
    assert "no finished sessions with a reward to export; 4 sessions without a reward left out" in told.stderr


def test_each_file_says_how_the_tokens_were_sampled(polar: Polar, run: RunFolder) -> None:
    said = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs_mode": "raw"}
    for form in ("json", "parquet", "safetensors"):
        assert polar("export", run.path, "--format", form).exit_code == 0
    for line in (run.path / "traces.jsonl").read_text().splitlines():
        assert all(said.items() <= trace["metadata"].items() for trace in json.loads(line)["trajectory"]["traces"])
    assert all(said.items() <= row.items() for row in pq.read_table(run.path / "traces.parquet").to_pylist())
    with safe_open(run.path / "traces.safetensors", "numpy") as file:
        assert json.loads(file.metadata()["sampling"]) == [said] * 4


@pytest.mark.parametrize("form", ["json", "sft", "parquet", "safetensors"])
def test_a_file_is_written_session_by_session(polar: Polar, run: RunFolder, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    made: list[weakref.ref[Trajectory]] = []
    alive: list[int] = []

    def watched(reader: CaptureReader, result: SessionResult, builder: BuilderName, policy: TrainingPolicy) -> Trajectory:
        alive.append(sum(known() is not None for known in made))
        built = trajectory(reader, result, builder, policy)
        made.append(weakref.ref(built))
        return built

    monkeypatch.setattr(import_module("polar.cli.export"), "trajectory", watched)
    every = ["--min-reward", "0"] if form == "sft" else []
    assert polar("export", run.path, "--format", form, *every).exit_code == 0
    assert (len(alive), max(alive)) == (3, 1), "while one is built, only the one before is still there"


def test_only_completed_sessions(polar: Polar, run: RunFolder) -> None:
    assert "2 sessions, 3 traces" in polar("export", run.path, "--format", "json", "--only", "completed").output


def test_another_builder(polar: Polar, run: RunFolder) -> None:
    assert "3 sessions, 8 traces" in polar("export", run.path, "--format", "json", "--builder", "per_request").output


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "traces.jsonl"
    target.write_text("before")
    with pytest.raises(TypeError), replacing(target) as file:
        file.write(b"half" + None)  # type: ignore[operator]
    assert (target.read_text(), list(tmp_path.iterdir())) == ("before", [target])


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot write .*: No such file"), replacing(tmp_path / "nowhere" / "x"):
        pass


def test_every_file_read_back_is_what_the_builder_made(polar: Polar, run: RunFolder) -> None:
    for form in ("json", "parquet", "safetensors"):
        assert polar("export", run.path, "--format", form).exit_code == 0
    lines = (run.path / "traces.jsonl").read_bytes().splitlines()
    read = {
        "json": [trace for line in lines for trace in read_json(line).trajectory.traces],
        "parquet": [placed.trace for placed in read_table(pq.read_table(run.path / "traces.parquet"))],
    }
    for found in read.values():
        for trace, made in zip(found, traces(run), strict=True):
            same(trace, told(made))
    tensors = [placed.trace for placed in read_tensors((run.path / "traces.safetensors").read_bytes())]
    assert [(ids(trace), trace.call_ids) for trace in tensors] == [(ids(made), made.call_ids) for made in traces(run)]


@pytest.mark.parametrize("form", ["json", "forest"])
def test_a_session_of_which_calls_are_gone_is_not_exported(polar: Polar, run: RunFolder, form: str) -> None:
    """What is left of it goes together, so only the result can tell."""
    Damage(run).capture("DELETE FROM nodes WHERE session = ? AND call_id = (SELECT call_id FROM calls WHERE ordinal = 2)", WORK)
    Damage(run).capture("DELETE FROM calls WHERE session = ? AND ordinal = 2", WORK)
    told = polar("export", run.path, "--format", form)
    assert (told.exit_code != 0, "ended with 3 calls, and 2 are stored" in told.stderr) == (True, True)


def test_each_session_is_a_row_group(polar: Polar, run: RunFolder) -> None:
    assert polar("export", run.path, "--format", "parquet").exit_code == 0
    assert pq.ParquetFile(run.path / "traces.parquet").num_row_groups == 3


def test_a_forest_has_the_traces_with_what_they_share_once(polar: Polar, run: RunFolder) -> None:
    told = polar("export", run.path, "--format", "forest")
    forest = read_forest((run.path / "forest.safetensors").read_bytes())
    assert f"3 sessions, 4 traces, {len(forest.ids):,} tokens" in told.output
    assert len(forest.ids) < sum(len(ids(trace)) for trace in traces(run))
    assert sorted(sequence.ids for sequence in sequences(forest)) == sorted(ids(trace) for trace in traces(run))
    assert forest.rewards.tolist() == [1.0, 0.0, 0.0]


def test_chats_for_fine_tuning(polar: Polar, run: RunFolder) -> None:
    assert polar("export", run.path, "--format", "sft", "--min-reward", "0").exit_code == 0
    chats = [json.loads(line) for line in (run.path / "sft.jsonl").read_text().splitlines()]
    assert len(chats) == 4
    trained = sum(message.get("weight", 0) for chat in chats for message in chat["messages"])
    assert trained == sum(len(trace.call_ids) for trace in traces(run))
    assert polar("export", run.path, "--format", "sft", "--longest", "--min-reward", "0").exit_code == 0
    assert len((run.path / "sft.jsonl").read_text().splitlines()) == 3


def test_chats_are_of_solved_sessions_unless_it_is_said_otherwise(polar: Polar, run: RunFolder) -> None:
    told = polar("export", run.path, "--format", "sft")
    assert "1 sessions, 1 traces" in told.output
    assert "2 with a reward below 1, 1 sessions without a reward left out" in told.output
    chats = [json.loads(line) for line in (run.path / "sft.jsonl").read_text().splitlines()]
    assert [(chat["task_id"], chat["reward"]) for chat in chats] == [("files", 1.0)]
    Damage(run).result(WORK, reward=0.5)
    told = polar("export", run.path, "--format", "sft")
    assert told.exit_code == 2
    assert "no session with a reward of at least 1 to export; the best has 0.5, which --min-reward 0.5 takes" in told.stderr
    assert "1 sessions, 1 traces" in polar("export", run.path, "--format", "sft", "--min-reward", "0.5").output


def test_what_is_trained_is_a_choice(polar: Polar, run: RunFolder) -> None:
    plain = polar("export", run.path, "--format", "json").output
    assert "4 traces" in plain
    assert "5 traces" in polar("export", run.path, "--format", "json", "--superseded", "train").output
    last = json.loads((run.path / "traces.jsonl").read_text().splitlines()[-1])["trajectory"]
    assert (last["metadata"]["policy"]["superseded"], "superseded" in last["metadata"]["accounting"]["excluded"]) == (
        "train",
        False,
    )
    polar("export", run.path, "--format", "json", "--truncated", "exclude")
    last = json.loads((run.path / "traces.jsonl").read_text().splitlines()[-1])["trajectory"]
    assert last["metadata"]["accounting"]["excluded"]["truncated"] > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--format", "json", "--longest"), "--longest is for"),
        (("--format", "parquet", "--min-reward", "0"), "--min-reward is for"),
        (("--format", "forest", "--builder", "per_request"), "no --builder"),
    ],
)
def test_options_that_a_format_does_not_know_are_wrong_usage(
    polar: Polar, run: RunFolder, options: tuple[str, ...], says: str
) -> None:
    told = polar("export", run.path, *options)
    assert (told.exit_code, says in told.stderr) == (2, True)
