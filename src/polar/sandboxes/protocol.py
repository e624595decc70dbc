"""Where a session's files live and its commands run.

A sandbox holds a workspace (what the task is about) and a home (what the harness needs); both are empty when it is made.
Paths that a command sees are `Sandbox.workspace` and `Sandbox.home`; where the sandbox can, they are the same for every
session, so that the prompts of a group are equal.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct


class Command(Struct, frozen=True):
    """What to run.

    Attributes:
        argv: program and arguments, as seen inside.
        env: the whole environment, nothing is inherited but PATH-like basics that the sandbox itself sets.
        stdin: text given on standard input, then end of file.
        readable: directories or files outside (a harness's installation) that the command may read, at the same path inside.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = {}
    stdin: str = ""
    readable: tuple[str, ...] = ()


class Exit(Struct, frozen=True):
    """How a command ended.

    Attributes:
        status: exit status; negative is the signal that ended it (`-9`).
        timed_out: it was killed because its time was up.
    """

    status: int
    timed_out: bool = False


class Sandbox(Protocol):
    """One isolated place. Methods raise `SandboxError` when the machine, not the command, fails."""

    kind: str
    workspace: str
    home: str

    async def put(self, files: Mapping[str, str], *, into: str) -> None:
        """Write text files below `into` (`workspace` or `home`, a path as seen inside). Refuses paths that leave it."""
        ...

    async def put_tree(self, source: Path, *, into: str) -> None:
        """Copy a directory of this machine into the sandbox."""
        ...

    async def run(self, command: Command, *, stdout: Path, stderr: Path, timeout: float) -> Exit:
        """Run in the workspace until it ends; its output goes to files of this machine. Cancelling kills it.

        When this returns, no process that the command started is alive.
        """
        ...

    async def get_tree(self, target: Path) -> None:
        """Copy the workspace out to a directory of this machine (made if missing)."""
        ...

    async def close(self) -> None:
        """Kill what runs and remove all files. Safe to call twice."""
        ...


class SandboxFactory(Protocol):
    """Makes sandboxes of one kind under `root`."""

    kind: str

    async def create(self, name: str) -> Sandbox: ...


def shell(line: str, env: Mapping[str, str] | None = None, readable: Sequence[str] = ()) -> Command:
    """A command that runs one shell line."""
    return Command(("/bin/sh", "-c", line), dict(env or {}), readable=tuple(readable))
