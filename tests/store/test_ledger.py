"""What the ledger remembers of a run."""

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from polar.errors import StoreError, UsageError
from polar.specs import Accounting, EvaluatorSpec, Finding, SessionResult, Task, Timeouts, Timing
from polar.store.ledger import Ledger, LedgerReader

replace = msgspec.structs.replace

TASK = Task("fix-1", "Fix the bug.", {"a.py": "x = 1\n"}, evaluator=EvaluatorSpec("command", "pytest"), samples=2)
RESULT = SessionResult(
    session_id="s1",
    task_id="fix-1",
    sample=0,
    status="completed",
    reward=0.1,
    calls=3,
    traces=2,
    accounting=Accounting(30, 20, {"aborted": 10}),
    timing=Timing(running=2.5),
    findings=(Finding("T14", "a token was trimmed", "c0"),),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest_asyncio.fixture
async def ledger(path: Path) -> AsyncIterator[Ledger]:
    """A ledger with task `fix-1` and session `s1`."""
    ledger = Ledger.open(path)
    await ledger.add_task(TASK, 0)
    await ledger.add_session("s1", "fix-1", 0, 0)
    yield ledger
    await ledger.close()


async def test_tasks_come_back_by_position(ledger: Ledger, path: Path) -> None:
    endless = Task("endless", "Wait.", timeouts=Timeouts(run=float("inf")))
    await ledger.add_task(endless, 2)
    await ledger.add_task(replace(TASK, id="fix-2"), 1)
    assert LedgerReader.open(path).tasks() == [TASK, replace(TASK, id="fix-2"), endless]


async def test_the_same_task_again_is_fine(ledger: Ledger) -> None:
    await ledger.add_task(TASK, 5)
    assert ledger.tasks() == [TASK]


async def test_a_changed_task_is_refused_naming_what_changed(ledger: Ledger) -> None:
    with pytest.raises(UsageError, match=r"task fix-1 is already in .* with other instruction, samples; give the changed task"):
        await ledger.add_task(replace(TASK, instruction="Fix it.", samples=4), 0)
    assert ledger.tasks() == [TASK]


async def test_a_session_begins_queued_and_ends_with_its_result(ledger: Ledger) -> None:
    assert [(session.stage, session.result) for session in ledger.sessions()] == [("queued", None)]
    await ledger.set_stage("s1", "running")
    assert [(session.stage, session.result) for session in ledger.sessions()] == [("running", None)]
    await ledger.finish(RESULT)
    assert [(session.stage, session.result) for session in ledger.sessions()] == [("done", RESULT)]


async def test_every_stage_change_is_kept_with_its_time(ledger: Ledger, path: Path) -> None:
    await ledger.set_stage("s1", "preparing")
    await ledger.finish(RESULT)
    rows = sqlite3.connect(path).execute("SELECT stage, time FROM stage_changes WHERE session_id = 's1'").fetchall()
    assert [stage for stage, _ in rows] == ["queued", "preparing", "done"]
    times = [time for _, time in rows]
    assert times == sorted(times)
    assert times[0] == ledger.sessions()[0].started


async def test_all_attempts_are_listed_by_task_sample_and_attempt(ledger: Ledger, path: Path) -> None:
    await ledger.add_task(replace(TASK, id="a-later-task"), 1)
    for session_id, task_id, sample, attempt in [("s5", "a-later-task", 0, 0), ("s4", "fix-1", 1, 0), ("s3", "fix-1", 0, 1)]:
        await ledger.add_session(session_id, task_id, sample, attempt)
    listed = [(s.session_id, s.task_id, s.sample, s.attempt) for s in LedgerReader.open(path).sessions()]
    assert listed == [("s1", "fix-1", 0, 0), ("s3", "fix-1", 0, 1), ("s4", "fix-1", 1, 0), ("s5", "a-later-task", 0, 0)]


async def test_a_result_never_changes(ledger: Ledger) -> None:
    await ledger.finish(RESULT)
    for change in (ledger.finish(replace(RESULT, reward=1.0)), ledger.set_stage("s1", "running")):
        with pytest.raises(StoreError, match=r"session s1 is finished in .*; a result never changes"):
            await change
    assert ledger.sessions()[0].result == RESULT


async def test_what_does_not_fit_is_refused_by_name(ledger: Ledger) -> None:
    refusals = {
        "session s9 is not in": ledger.set_stage("s9", "running"),
        "session s8 is not in": ledger.finish(replace(RESULT, session_id="s8")),
        "session s1 is done only with its result": ledger.set_stage("s1", "done"),
        "session s2 is of task fix-9, which is not in": ledger.add_session("s2", "fix-9", 0, 0),
        "session s1, or attempt 0 at sample 1 of task fix-1, is already in": ledger.add_session("s1", "fix-1", 1, 0),
        "session s2, or attempt 0 at sample 0 of task fix-1, is already in": ledger.add_session("s2", "fix-1", 0, 0),
    }
    for why, change in refusals.items():
        with pytest.raises(StoreError, match=why):
            await change
    assert len(ledger.sessions()) == 1


async def test_settings_of_the_run_can_be_set_again(ledger: Ledger, path: Path) -> None:
    await ledger.set_meta("engine", "embedded")
    await ledger.set_meta("model", "smol")
    await ledger.set_meta("engine", "vllm")
    assert ledger.meta() == LedgerReader.open(path).meta() == {"engine": "vllm", "model": "smol"}


async def test_a_run_goes_on_where_it_stood(ledger: Ledger, path: Path) -> None:
    await ledger.finish(RESULT)
    await ledger.close()
    again = Ledger.open(path)
    assert again.tasks() == [TASK]
    assert [session.result for session in again.sessions()] == [RESULT]
    await again.close()
