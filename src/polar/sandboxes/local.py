"""What the sandboxes of this machine have in common: three directories, and commands that are ended for certain."""

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from polar.errors import SandboxError, UsageError
from polar.sandboxes import trees
from polar.sandboxes.processes import Running
from polar.sandboxes.protocol import Command, Exit

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
if sys.platform == "darwin":
    SEARCH_PATH = f"/opt/homebrew/bin:{SEARCH_PATH}"


def make_place(root: Path, name: str) -> Path:
    """A new directory below `root`, holding empty `workspace`, `home` and `tmp`."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise UsageError(f"{name!r} is no name for a sandbox: use letters, digits, `.`, `_` and `-`")
    try:
        root.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root.resolve()))
        for part in ("workspace", "home", "tmp"):
            (place / part).mkdir(mode=0o700)
    except OSError as error:
        raise SandboxError(f"a sandbox cannot be made in {root}: {error.strerror}") from error
    return place


class LocalSandbox:
    """Base of the sandboxes whose files are directories of this machine.

    Args:
        place: directory with `workspace`, `home` and `tmp`; removed by `close`.
        workspace, home, tmp: the same three as a command sees them.
    """

    kind: str

    def __init__(self, place: Path, *, workspace: str, home: str, tmp: str) -> None:
        self.workspace, self.home, self._tmp = workspace, home, tmp
        self._place = place
        self._running: set[Running] = set()
        self._closed = False

    async def put(self, files: Mapping[str, str], *, into: str) -> None:
        """Write text files below `into`; see `Sandbox.put`."""
        await asyncio.to_thread(trees.write_files, self._outside(into), files)

    async def put_tree(self, source: Path, *, into: str) -> None:
        """Copy a directory of this machine into the sandbox."""
        await asyncio.to_thread(trees.copy_tree, source, self._outside(into))

    async def run(self, command: Command, *, stdout: Path, stderr: Path, timeout: float) -> Exit:
        """Run in the workspace; see `Sandbox.run`. 64 MiB of each output are kept."""
        raise NotImplementedError

    async def get_tree(self, target: Path) -> None:
        """Copy the workspace out. One that the agent removed, or replaced by a link, is an empty one."""
        await asyncio.to_thread(trees.take_tree, self._place / "workspace", target)

    async def close(self) -> None:
        """Kill what runs and remove all files. Safe to call twice."""
        self._closed = True
        running = tuple(self._running)
        for each in running:
            each.stop()
        for each in running:
            await each.ended.wait()
        await asyncio.to_thread(trees.remove_tree, self._place)

    async def _supervise(
        self,
        argv: Sequence[str],
        command: Command,
        *,
        stdout: Path,
        stderr: Path,
        timeout: float,
        wrapped: bool = False,
        pass_fds: tuple[int, ...] = (),
    ) -> Exit:
        if self._closed:
            raise SandboxError("the sandbox is closed")
        workspace = self._place / "workspace"
        environment = {
            "PATH": SEARCH_PATH,
            "HOME": self.home,
            "TMPDIR": self._tmp,
            "LANG": "C.UTF-8",
            "PWD": self.workspace,
            **command.env,
        }
        running = Running.start(
            argv,
            env=environment,
            cwd=workspace,
            stdin=command.stdin,
            stdout=stdout,
            stderr=stderr,
            wrapped=wrapped,
            pass_fds=pass_fds,
        )
        self._running.add(running)
        try:
            return await running.wait(timeout)
        finally:
            self._running.discard(running)

    def _outside(self, into: str) -> Path:
        known = {self.workspace: self._place / "workspace", self.home: self._place / "home"}
        if into not in known:
            raise UsageError(f"files can be put into {self.workspace} or {self.home} of this sandbox, not into {into}")
        return known[into]


def missing(paths: Sequence[str]) -> str:
    """The first of `paths` that does not exist, or an empty text."""
    return next((path for path in paths if not os.path.exists(path)), "")
