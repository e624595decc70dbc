"""What a run does when the machine under it fails: it says so, loses nothing, and goes on when asked again."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from polar.engines.launch import EngineProcess, engine_process
from polar.engines.scripted import Scripted, ScriptedCall
from polar.errors import EngineError, StoreError
from polar.rollout import connect
from polar.rollout.folder import RunFolder
from polar.rollout.observer import Silent
from polar.rollout.runner import RunOptions, run_tasks
from polar.specs import SessionResult, Task
from polar.store.ledger import LedgerReader
from tests.rollout.conftest import Policy, Watching, agent_task, write_and_answer


def slow_when_asked(call: ScriptedCall) -> Scripted:
    """For the engine's own process: a task that says `slow` never gets an answer while the flag file is there."""
    waiting = "slow" in call.prompt_text and Path(os.environ["SLOW_FLAG"]).exists()
    return Scripted("word " * 3000, delay_per_token=0.05) if waiting else write_and_answer(call)


def recorded(out: Path) -> list[SessionResult]:
    with closing(LedgerReader.open(RunFolder(out).ledger)) as ledger:
        return [session.result for session in ledger.sessions() if session.result]


async def test_an_engine_that_dies_in_mid_run_stops_it_and_nothing_is_lost(
    smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "slow"
    flag.touch()
    monkeypatch.setenv("SLOW_FLAG", str(flag))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pids: list[int] = []

    @asynccontextmanager
    async def scripted(model: str, *, log: Path) -> AsyncIterator[EngineProcess]:
        script = f"{__name__}:slow_when_asked"
        command = [sys.executable, "-m", "polar.engines.scripted", "--model-dir", str(smollm2_dir), "--script", script]
        async with engine_process([*command, "--log", str(tmp_path / "engine.jsonl")], log=log) as process:
            pids.append(process.pid)
            yield process

    monkeypatch.setattr(connect, "embedded_engine", scripted)
    tasks = [agent_task("quick"), agent_task("slow", instruction="slow")]
    options = RunOptions(tmp_path / "run", sandbox="process", concurrency=4)
    watching = Watching()
    running = asyncio.create_task(run_tasks(tasks, options, watching))
    async with asyncio.timeout(90):
        while len(watching.results) < 2:
            assert not running.done(), await running
            await asyncio.sleep(0.05)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match="signal 9|SIGKILL|status -9"):
        await running
    assert sorted(result.status for result in recorded(options.out)) == ["cancelled", "cancelled", "completed", "completed"]
    flag.unlink()
    summary = await run_tasks(tasks, options, Silent())
    assert [result.status for result in summary.results] == ["completed"] * 4
    assert {result.session_id for result in summary.results} > {result.session_id for result in watching.results[:2]}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of sixteen megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], check=False).returncode:
        pytest.skip("this container lets nobody mount")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


async def test_a_full_disk_stops_the_run_by_name_and_it_goes_on_once_there_is_space(policy: Policy, small_disk: Path) -> None:
    tasks: list[Task] = [agent_task("many", samples=12)]
    async with policy() as (_, given):
        options = RunOptions(small_disk / "run", given.engine, sandbox="process", concurrency=2)
        watching = Watching()
        running = asyncio.create_task(run_tasks(tasks, options, watching))
        async with asyncio.timeout(60):
            while len(watching.results) < 2:
                assert not running.done(), await running
                await asyncio.sleep(0.02)
        ballast = small_disk / "ballast"
        fill(ballast)
        with pytest.raises(StoreError, match="disk full"):
            await running
        safe = [result for result in watching.results if result.reward == 1.0]
        assert 2 <= len(safe) < 12
        ballast.unlink()
        summary = await run_tasks(tasks, options, Silent())
    assert [result.reward for result in summary.results] == [1.0] * 12
    assert {result.session_id for result in safe} < {result.session_id for result in summary.results}


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            return
