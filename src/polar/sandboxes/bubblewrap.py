"""Sandboxes with a view of the file system of their own, made by bubblewrap (bwrap).

A command sees the machine's programs read-only, its workspace at `/workspace`, its home at `/home/agent`, and nothing
else of the host: no other home, no other session. It is user 1000 without capabilities, in process, IPC and host-name
namespaces of its own; the network is the host's, because the gateway listens on loopback.
"""

import asyncio
import functools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from polar.errors import SandboxError
from polar.sandboxes.local import SEARCH_PATH, LocalSandbox, make_place, missing
from polar.sandboxes.processes import MARK
from polar.sandboxes.protocol import Command, Exit, Sandbox

WORKSPACE, HOME, TMP = "/workspace", "/home/agent", "/tmp"
USER = "1000"
PROBE_TIMEOUT = 20.0  # seconds
_SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# What programs need of /etc. Not /etc as a whole: it holds host keys, and the passwords of registries.
_SETTINGS = (
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/nsswitch.conf",
    "/etc/pki/ca-trust/extracted",
    "/etc/pki/tls/certs",
    "/etc/protocols",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
)
_PASSWD = f"root:x:0:0:root:/root:/usr/sbin/nologin\nagent:x:{USER}:{USER}:agent:{HOME}:/bin/sh\n"
_GROUP = f"root:x:0:\nagent:x:{USER}:\n"


def wrap(place: Path, argv: Sequence[str], *, readable: Sequence[str] = (), status_fd: int | None = None) -> list[str]:
    """The command line that runs `argv` in the sandbox `place`.

    Args:
        readable: paths of the host that are visible too, read-only and at the same path.
        status_fd: where bwrap reports whether the command started.
    """
    system = [part for path in _SYSTEM_LINKS for part in _system(Path(path))]
    settings = [part for path in _SETTINGS for part in ("--ro-bind-try", path, path)]
    users = ["--ro-bind", str(place / "passwd"), "/etc/passwd", "--ro-bind", str(place / "group"), "/etc/group"]
    own = [("tmp", TMP), ("tmp", "/var/tmp"), ("workspace", WORKSPACE), ("home", HOME)]
    binds = [part for name, inside in own for part in ("--bind", str(place / name), inside)]
    extra = [part for path in readable for part in ("--ro-bind", path, path)]
    return [
        *("bwrap", "--unshare-user", "--uid", USER, "--gid", USER, "--cap-drop", "ALL", *_no_more_namespaces()),
        *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox", "--unshare-cgroup-try"),
        *("--die-with-parent", "--new-session", "--unsetenv", MARK),
        *("--ro-bind", "/usr", "/usr", *system, *settings, *users, "--dev", "/dev"),
        # Read-only, because to the kernel user 1000 is who runs Polar: as root it could set the host's /proc/sys.
        *("--proc", "/proc", "--remount-ro", "/proc"),
        *(*binds, *extra, "--remount-ro", "/", "--chdir", WORKSPACE),
        *(() if status_fd is None else ("--json-status-fd", str(status_fd))),
        # Through a shell, so that a program which is missing or not executable gives 127 or 126, as everywhere.
        *("--", "/bin/sh", "-c", 'exec "$@"', "sh", *argv),
    ]


@functools.cache
def _no_more_namespaces() -> tuple[str, ...]:
    """The option (of bwrap 0.8 and later) that keeps a command from regaining capabilities in a user namespace of its own."""
    said = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, timeout=PROBE_TIMEOUT, check=False).stdout
    return ("--disable-userns",) if "--disable-userns" in said else ()


def _system(path: Path) -> list[str]:
    if path.is_symlink():
        return ["--symlink", os.readlink(path), str(path)]
    return ["--ro-bind", str(path), str(path)] if path.is_dir() else []


def make_users(place: Path) -> None:
    """Write the user database that commands see."""
    (place / "passwd").write_text(_PASSWD)
    (place / "group").write_text(_GROUP)


@functools.cache
def problem() -> str:
    """Why bubblewrap cannot run here, or an empty text if it can. Found by running it, once."""
    if shutil.which("bwrap", path=SEARCH_PATH) is None:
        return "the program bwrap is not installed"
    with tempfile.TemporaryDirectory() as root:
        place = make_place(Path(root), "probe")
        make_users(place)
        try:
            done = subprocess.run(wrap(place, ["true"]), capture_output=True, timeout=PROBE_TIMEOUT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"bwrap does not run: {error}"
    said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return "" if done.returncode == 0 else f"bwrap fails: {said or f'exit status {done.returncode}'}"


class BubblewrapSandbox(LocalSandbox):
    """A sandbox behind bwrap."""

    kind = "bubblewrap"

    async def run(self, command: Command, *, stdout: Path, stderr: Path, timeout: float) -> Exit:
        """Run in `/workspace`; see `Sandbox.run`. A status above 128 is read as a signal, as bwrap passes signals on."""
        if path := missing(command.readable):
            raise SandboxError(f"{path} does not exist, and should be readable in the sandbox")
        with tempfile.TemporaryFile() as report:
            argv = wrap(self._place, command.argv, readable=command.readable, status_fd=report.fileno())
            ended = await self._supervise(
                argv, command, stdout=stdout, stderr=stderr, timeout=timeout, wrapped=True, pass_fds=(report.fileno(),)
            )
            report.seek(0)
            started = b"exit-code" in report.read()
        if started or ended.timed_out or ended.status < 0:
            return Exit(_signal_of(ended.status), ended.timed_out)
        raise SandboxError(f"bwrap could not start {command.argv[0]}: {await asyncio.to_thread(_last_line, stderr)}")


class BubblewrapSandboxes:
    """Makes `bubblewrap` sandboxes, whose files are in directories below `root`."""

    kind = "bubblewrap"

    def __init__(self, root: Path) -> None:
        self._root = root

    async def create(self, name: str) -> Sandbox:
        """A new sandbox."""
        place = make_place(self._root, name)
        make_users(place)
        return BubblewrapSandbox(place, workspace=WORKSPACE, home=HOME, tmp=TMP)


def _signal_of(status: int) -> int:
    number = status - 128
    return -number if number in set(signal.Signals) else status


def _last_line(file: Path) -> str:
    return file.read_text(errors="replace").strip().rpartition("\n")[2]
