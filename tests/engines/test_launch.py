"""An engine as a process of its own: ready when it says so, noticed when it dies, and gone when we are."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from polar.engines.launch import engine_process
from polar.engines.vllm import VllmEngine
from polar.errors import EngineError, UsageError


async def gone(pid: int) -> None:
    async with asyncio.timeout(5):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)


async def test_it_answers_once_it_is_ready_and_is_gone_afterwards(
    engine_command: list[str], smollm2_dir: Path, tmp_path: Path
) -> None:
    async with engine_process(engine_command, log=tmp_path / "logs" / "engine.log") as process:
        engine = VllmEngine(process.url)
        assert (await engine.info()).model_path == str(process.model_dir) == str(smollm2_dir)
        await engine.close()
        assert not process.died.done()
        assert process.url in process.log.read_text()
    assert process.died.result() == 0
    assert not psutil.pid_exists(process.pid)


async def test_one_that_is_given_a_key_asks_for_it(engine_command: list[str], tmp_path: Path) -> None:
    async with engine_process(engine_command, log=tmp_path / "engine.log", key="the-key") as process:
        assert process.key == "the-key"
        assert "the-key" not in repr(process)
        engine = VllmEngine(process.url)
        with pytest.raises(EngineError, match="with 401"):
            await engine.info()
        await engine.close()


async def test_the_key_of_another_engine_is_not_handed_down(
    engine_command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLAR_ENGINE_KEY", "of-another")
    async with engine_process(engine_command, log=tmp_path / "engine.log") as process:
        engine = VllmEngine(process.url)
        await engine.info()
        await engine.close()


async def test_a_log_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write the engine's log \S+/file/engine\.log: (Not a directory|File exists)"):
        async with engine_process(["true"], log=tmp_path / "file" / "engine.log"):
            pass
    with pytest.raises(UsageError, match=r"cannot write the engine's log \S+: Is a directory; choose"):
        async with engine_process(["true"], log=tmp_path):
            pass


async def test_an_earlier_run_in_the_same_log_is_not_taken_for_this_one(engine_command: list[str], tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("polar engine ready on http://127.0.0.1:9 (an earlier run)\n")
    async with engine_process(engine_command, log=log) as process:
        assert process.url != "http://127.0.0.1:9"
    assert log.read_text().count("ready on") == 2


async def test_its_death_in_mid_run_is_noticed(engine_command: list[str], tmp_path: Path) -> None:
    async with engine_process(engine_command, log=tmp_path / "engine.log") as process:
        watch = asyncio.ensure_future(process.wait_dead())
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(2):
            death = await watch
        assert process.died.result() == -signal.SIGKILL
    assert isinstance(death, EngineError)
    assert "died with signal SIGKILL" in str(death)


async def test_a_watcher_that_is_cancelled_leaves_the_process_watched(engine_command: list[str], tmp_path: Path) -> None:
    async with engine_process(engine_command, log=tmp_path / "engine.log") as process:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.wait_dead(), 0.01)
        assert not process.died.cancelled()


async def test_one_that_dies_before_it_is_ready_says_why(tmp_path: Path) -> None:
    code = "import sys; [print('line', n) for n in range(50)]; sys.exit('no such model')"
    with pytest.raises(EngineError, match=r"(?s)died with status 1; .*line 49\nno such model") as caught:
        async with engine_process([sys.executable, "-c", code], log=tmp_path / "engine.log"):
            pass
    assert "line 20" not in str(caught.value)


async def test_one_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    code = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(EngineError, match="not ready within 1 s"):
        async with engine_process([sys.executable, "-c", code], log=tmp_path / "engine.log", timeout=1.0):
            pass
    assert not psutil.pid_exists(int((tmp_path / "engine.log").read_text().split()[1]))


async def test_one_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.engines.launch.GRACE_SECONDS", 0.2)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    with pytest.raises(EngineError, match="not ready"):
        async with engine_process([sys.executable, "-c", code], log=tmp_path / "engine.log", timeout=1.0):
            pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child whose parent was killed")
async def test_it_does_not_outlive_a_parent_that_was_killed(engine_command: list[str], tmp_path: Path) -> None:
    runner = (
        "import asyncio, pathlib, sys\n"
        "from polar.engines.launch import engine_process\n"
        "async def main():\n"
        "    async with engine_process(sys.argv[2:], log=pathlib.Path(sys.argv[1])) as process:\n"
        "        print(process.pid, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    options = (str(tmp_path / "engine.log"), *engine_command)
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", runner, *options, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    await parent.wait()
    await gone(pid)
