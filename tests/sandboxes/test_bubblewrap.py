"""What only bubblewrap can promise: the host is not to be seen."""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.errors import SandboxError
from polar.sandboxes import Command, Exit, choose
from tests.sandboxes.conftest import Box, need_bubblewrap


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    need_bubblewrap()
    sandbox = await choose("bubblewrap", tmp_path / "sandboxes").create("test")
    yield Box(sandbox, tmp_path)
    await sandbox.close()


async def test_two_sandboxes_have_the_same_paths(box: Box, tmp_path: Path) -> None:
    other = await choose("bubblewrap", tmp_path / "elsewhere").create("other")
    assert (box.sandbox.workspace, box.sandbox.home) == (other.workspace, other.home) == ("/workspace", "/home/agent")
    seen = []
    for each in (box, Box(other, tmp_path)):
        await each.run("pwd; cd; pwd; env | sort; hostname; id; ls -a /workspace /home/agent /tmp")
        seen.append(each.out)
    await other.close()
    assert seen[0] == seen[1]


async def test_the_host_is_not_visible(box: Box, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    other = await choose("bubblewrap", tmp_path / "sandboxes").create("other")
    await box.run("ls -A / /home /tmp /etc; ls " + str(Path.home()))
    await other.close()
    assert "No such file" in box.err
    found = set(box.out.split())
    assert not found & {"root", "mnt", "opt", "srv", "run", "boot", "sys", "shadow", "hostname", "pip.conf", "other"}
    for path in (tmp_path / "secret", tmp_path / "sandboxes", Path.home(), Path("/etc/ssl/private"), Path("/var/lib")):
        assert await box.run(Command(("test", "-e", str(path)))) == Exit(1)


@pytest.mark.parametrize("path", ["/usr", "/etc", "/", "/etc/passwd", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"])
async def test_nothing_of_the_host_is_writable(box: Box, path: str) -> None:
    assert await box.run(Command(("test", "-w", path))) == Exit(1)


async def test_workspace_home_and_tmp_are_writable(box: Box) -> None:
    assert await box.run("touch /workspace/x /home/agent/x /tmp/x /var/tmp/x /dev/shm/x && echo out > /dev/stderr") == Exit(0)


async def test_there_are_no_capabilities_and_no_other_processes(box: Box) -> None:
    await box.run("grep CapEff /proc/self/status; mount -t tmpfs none /tmp; ls -d /proc/[0-9]* | wc -l; chroot / true")
    assert "CapEff:\t0000000000000000" in box.out
    assert int(box.out.split()[-1]) < 8
    assert "must be superuser" in box.err
    assert "Operation not permitted" in box.err


async def test_files_that_the_agent_makes_belong_to_who_runs_polar(box: Box, tmp_path: Path) -> None:
    await box.run("echo x > made; chmod 000 made; mkdir locked; echo y > locked/z; chmod 000 locked")
    await box.sandbox.get_tree(tmp_path / "copy")
    assert (tmp_path / "copy" / "made").stat().st_uid == os.getuid()
    assert (tmp_path / "copy" / "locked" / "z").read_text() == "y\n"


async def test_what_is_readable_is_read_only_at_its_own_path(box: Box, tmp_path: Path) -> None:
    program = tmp_path / "tools" / "program"
    program.mkdir(parents=True)
    (program / "x").write_text("tool")
    assert await box.run(Command(("cat", str(program / "x")), readable=(str(program),))) == Exit(0)
    assert box.out == "tool"
    assert (await box.run(Command(("touch", str(program / "y")), readable=(str(program),)))).status == 1
    with pytest.raises(SandboxError, match="does not exist"):
        await box.run(Command(("true",), readable=(str(tmp_path / "missing"),)))


async def test_python_and_its_network_work(box: Box) -> None:
    program = """
import getpass, json, os, socket, ssl
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
mode = ssl.create_default_context().verify_mode.name
print(json.dumps([getpass.getuser(), os.path.expanduser("~"), socket.gethostbyname("localhost"), mode]))
"""
    assert await box.run(Command(("python3", "-c", program))) == Exit(0), box.err
    assert json.loads(box.out) == ["agent", "/home/agent", "127.0.0.1", "CERT_REQUIRED"]


async def test_a_sandbox_that_bwrap_cannot_make_is_an_error_of_the_machine(box: Box, tmp_path: Path) -> None:
    (next((tmp_path / "sandboxes").iterdir()) / "passwd").unlink()
    with pytest.raises(SandboxError, match="bwrap could not start true: .*passwd"):
        await box.run(Command(("true",)))
