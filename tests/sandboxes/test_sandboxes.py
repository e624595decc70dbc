"""What every kind of sandbox promises."""

import asyncio
import os
import time
from pathlib import Path

import psutil
import pytest

from polar.errors import SandboxError, UsageError
from polar.sandboxes import Command, Exit, SandboxFactory, processes, shell
from polar.sandboxes.trees import remove_tree
from tests.sandboxes.conftest import OpenBox

# A process that leaves its parent, its session and its process group, and forgets its environment.
DAEMON = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sleep", ["sleep", sys.argv[1]], {})
    os._exit(0)
os.wait()
"""


def alive(*argv: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == list(argv)]


def naps() -> str:
    """Seconds to sleep that no other process of this machine sleeps: they name the process."""
    return f"9{os.getpid()}{time.monotonic_ns() % 10**9}"


async def test_a_command_runs_in_the_workspace_and_its_status_comes_back(open_box: OpenBox) -> None:
    async with open_box() as box:
        assert await box.run("pwd; echo problem >&2; exit 7") == Exit(7)
        assert box.out == f"{box.sandbox.workspace}\n"
        assert box.err == "problem\n"


async def test_a_command_ended_by_a_signal_says_so(open_box: OpenBox) -> None:
    async with open_box() as box:
        assert await box.run("kill -9 $$") == Exit(-9)


async def test_a_command_that_cannot_run_ends_as_a_shell_would_say_it(open_box: OpenBox) -> None:
    async with open_box() as box:
        assert await box.run(Command(("no-such-program",))) == Exit(127)
        assert "no-such-program" in box.err
        await box.sandbox.put({"plain": "x"}, into=box.sandbox.workspace)
        assert await box.run(Command(("./plain",))) == Exit(126)


async def test_the_environment_is_what_the_command_gives_and_the_basics(
    open_box: OpenBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "1")
    async with open_box() as box:
        await box.run(Command(("env",), {"MINE": "a b"}))
        found = dict(line.split("=", 1) for line in box.out.splitlines())
        found.pop(processes.MARK, None)
        assert set(found) - {"_", "SHLVL"} == {"PATH", "HOME", "TMPDIR", "LANG", "PWD", "MINE"}
        assert found["HOME"] == box.sandbox.home
        assert found["MINE"] == "a b"


async def test_standard_input_is_given_and_ends(open_box: OpenBox) -> None:
    async with open_box() as box:
        await box.run(Command(("cat",), stdin="é" * 300_000))
        assert box.out == "é" * 300_000
        assert await box.run(Command(("cat",))) == Exit(0)
        assert box.out == ""


async def test_home_and_temporary_files_are_the_sandboxs_own(open_box: OpenBox) -> None:
    async with open_box() as box:
        await box.sandbox.put({"notes/a.txt": "kept"}, into=box.sandbox.home)
        assert await box.run('cat "$HOME/notes/a.txt" && mktemp') == Exit(0)
        assert box.out.startswith("kept")


async def test_time_that_is_up_kills_with_grace(open_box: OpenBox) -> None:
    async with open_box() as box:
        ended = await box.run("trap 'echo asked; exit 5' TERM; while :; do sleep 0.05; done", timeout=0.5)
        assert ended == Exit(5, timed_out=True)
        assert box.out == "asked\n"


async def test_who_ignores_the_request_to_end_is_killed(open_box: OpenBox) -> None:
    async with open_box() as box:
        ended = await box.run("trap '' TERM; while :; do sleep 0.05; done", timeout=0.5)
        assert ended == Exit(-9, timed_out=True)


@pytest.mark.parametrize("last", ["exit 0", "sleep 600"])
async def test_a_daemon_does_not_outlive_its_command(open_box: OpenBox, last: str) -> None:
    nap = naps()
    async with open_box() as box:
        await box.sandbox.put({"daemon.py": DAEMON}, into=box.sandbox.workspace)
        ended = await box.run(f"python3 daemon.py {nap} && echo started; {last}", timeout=5)
        assert box.out == "started\n"
        assert ended.timed_out == (last != "exit 0")
        assert alive("sleep", nap) == []


async def test_cancelling_kills_daemons_too(open_box: OpenBox) -> None:
    nap = naps()
    async with open_box() as box:
        await box.sandbox.put({"daemon.py": DAEMON}, into=box.sandbox.workspace)
        running = asyncio.create_task(box.run(f"python3 daemon.py {nap}; sleep {nap}", timeout=600))
        while len(alive("sleep", nap)) < 2:
            await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert alive("sleep", nap) == []


def test_a_loop_that_cancels_all_its_tasks_leaves_nothing_alive(factory: SandboxFactory, tmp_path: Path) -> None:
    nap = naps()

    async def session() -> None:
        sandbox = await factory.create("test")
        line = shell(f"trap '' TERM; sleep {nap}; sleep {nap}")
        try:
            await sandbox.run(line, stdout=tmp_path / "o", stderr=tmp_path / "e", timeout=600)
        finally:
            await sandbox.close()

    async def main() -> None:
        abandoned = asyncio.create_task(session())
        while not alive("sleep", nap):
            await asyncio.sleep(0.05)
        assert not abandoned.done()

    asyncio.run(main())
    assert alive("sleep", nap) == []
    assert list((tmp_path / "sandboxes").iterdir()) == []


async def test_closing_ends_what_runs(open_box: OpenBox) -> None:
    nap = naps()
    async with open_box() as box:
        running = asyncio.create_task(box.run(f"sleep {nap}", timeout=600))
        while not alive("sleep", nap):
            await asyncio.sleep(0.05)
        await box.sandbox.close()
        assert alive("sleep", nap) == []
        assert (await running).status != 0
        with pytest.raises(SandboxError, match="closed"):
            await box.run("true")


async def test_commands_run_side_by_side(open_box: OpenBox) -> None:
    async with open_box() as box:
        started = time.monotonic()
        ended = await asyncio.gather(
            *(
                box.sandbox.run(shell(f"sleep 1; exit {n}"), stdout=box.logs / f"o{n}", stderr=box.logs / f"e{n}", timeout=20)
                for n in range(8)
            )
        )
        assert [each.status for each in ended] == list(range(8))
        assert time.monotonic() - started < 6


async def test_output_beyond_the_limit_is_dropped_with_a_line_saying_so(
    open_box: OpenBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "OUTPUT_LIMIT", 100_000)
    async with open_box() as box:
        assert await box.run("yes | head -c 5000000; echo short >&2") == Exit(0)
        assert len(box.out) < 100_100
        assert box.out.splitlines()[-1] == "[polar: output beyond 100000 bytes was dropped]"
        assert box.err == "short\n"


async def test_a_file_cannot_be_put_outside(open_box: OpenBox) -> None:
    async with open_box() as box:
        for path in ("../escaped", "/etc/escaped", "a/../../escaped", "", "."):
            with pytest.raises(UsageError, match="relative"):
                await box.sandbox.put({path: "x"}, into=box.sandbox.workspace)
        with pytest.raises(UsageError, match="not into /etc"):
            await box.sandbox.put({"x": "x"}, into="/etc")


async def test_a_file_is_not_put_through_a_link_that_leads_out(open_box: OpenBox, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    async with open_box() as box:
        await box.run(f"ln -s {outside} away; ln -s {outside}/f f; mkdir sub; ln -s sub near")
        with pytest.raises(SandboxError, match="symbolic link"):
            await box.sandbox.put({"away/f": "x"}, into=box.sandbox.workspace)
        await box.sandbox.put({"f": "replaced", "near/g": "followed"}, into=box.sandbox.workspace)
        await box.run("cat f sub/g")
        assert box.out == "replacedfollowed"
        assert list(outside.iterdir()) == []


async def test_trees_go_in_and_out_without_following_links(open_box: OpenBox, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "deep" / "run.sh").chmod(0o755)
    (source / "passwd").symlink_to("/etc/passwd")
    async with open_box() as box:
        await box.sandbox.put_tree(source, into=box.sandbox.workspace)
        assert await box.run("./deep/run.sh; ln -s /etc/shadow shadow; mkfifo pipe;") == Exit(0)
        await box.sandbox.get_tree(target)
    assert sorted(path.name for path in target.iterdir()) == ["deep", "passwd", "shadow"]
    assert os.readlink(target / "shadow") == "/etc/shadow"
    assert os.access(target / "deep" / "run.sh", os.X_OK)


async def test_closing_removes_all_even_what_is_read_only_or_very_deep(factory: SandboxFactory, tmp_path: Path) -> None:
    sandbox = await factory.create("test")
    deep = "import os\nfor _ in range(2100): os.mkdir('d'); os.chdir('d')"
    line = shell(f'mkdir -p ro/in && touch ro/in/x && chmod -R a-w ro && python3 -c "{deep}"')
    assert await sandbox.run(line, stdout=tmp_path / "o", stderr=tmp_path / "e", timeout=60) == Exit(0)
    await sandbox.get_tree(tmp_path / "copy")
    remove_tree(tmp_path / "copy")  # pytest could not
    await sandbox.close()
    await sandbox.close()
    assert list((tmp_path / "sandboxes").iterdir()) == []


async def test_a_name_can_be_used_again_but_must_be_a_name(factory: SandboxFactory) -> None:
    first, second = await factory.create("s1"), await factory.create("s1")
    await first.close()
    await second.put({"still": "there"}, into=second.workspace)
    await second.close()
    with pytest.raises(UsageError, match="name for a sandbox"):
        await factory.create("../s1")


async def test_an_argument_that_no_system_takes_is_an_error_of_the_sandbox(open_box: OpenBox) -> None:
    async with open_box() as box:
        with pytest.raises(SandboxError, match="cannot be started"):
            await box.run(Command(("true", "x" * 10_000_000)))
