"""Sandboxes that are plain processes."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from polar.sandboxes import Exit, choose
from tests.sandboxes.conftest import Box
from tests.sandboxes.test_sandboxes import alive, naps

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has no subreapers")


async def open_process_box(tmp_path: Path) -> Box:
    return Box(await choose("process", tmp_path / "sandboxes").create("test"), tmp_path)


async def test_a_command_that_kills_its_supervisor_gains_nothing(tmp_path: Path) -> None:
    nap = naps()
    box = await open_process_box(tmp_path)
    assert await box.run(f"setsid sleep {nap} & sleep 0.2; kill -9 $PPID; sleep {nap}") == Exit(-9)
    assert alive("sleep", nap) == []
    await box.sandbox.close()


async def test_a_command_that_stops_its_supervisor_gains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.sandboxes.processes.SUPERVISOR_PATIENCE", 1.0)
    nap = naps()
    box = await open_process_box(tmp_path)
    ended = await box.run(f"kill -STOP $PPID; sleep {nap}", timeout=1)
    assert ended == Exit(-9, timed_out=True)
    assert alive("sleep", nap) == []
    await box.sandbox.close()


async def test_a_workspace_that_became_a_link_is_empty(tmp_path: Path) -> None:
    box = await open_process_box(tmp_path)
    await box.run('w=$PWD; cd ..; rm -rf "$w"; ln -s /etc "$w"')
    await box.sandbox.get_tree(tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []
    await box.sandbox.close()
    assert Path("/etc/passwd").exists()


def test_nothing_survives_the_death_of_polar_itself(tmp_path: Path) -> None:
    nap = naps()
    program = f"""
import asyncio
from pathlib import Path
from polar.sandboxes import choose, shell
async def main():
    sandbox = await choose("process", Path({str(tmp_path)!r})).create("test")
    line = shell("setsid sleep {nap} & sleep {nap}")
    await sandbox.run(line, stdout=Path("/dev/null"), stderr=Path("/dev/null"), timeout=600)
asyncio.run(main())
"""
    polar = subprocess.Popen([sys.executable, "-c", program])
    wait_for(lambda: len(alive("sleep", nap)) == 2)
    psutil.Process(polar.pid).kill()
    polar.wait()
    wait_for(lambda: alive("sleep", nap) == [])


def wait_for(condition: object, seconds: float = 15.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
