"""Sandboxes that are nothing but directories and processes of this machine.

They keep sessions apart and clean up after them; they are no wall. A command may read and write what the user who runs
Polar may. On Linux nothing that a command started survives it, not even a daemon. On macOS, which has no subreapers, a
process that leaves its group *and* clears its environment can survive.
"""

import logging
import sys
from pathlib import Path

from polar.sandboxes.local import LocalSandbox, make_place
from polar.sandboxes.protocol import Command, Exit, Sandbox

_log = logging.getLogger(__name__)


class ProcessSandbox(LocalSandbox):
    """A directory with a workspace, a home and a place for temporary files."""

    kind = "process"

    async def run(self, command: Command, *, stdout: Path, stderr: Path, timeout: float) -> Exit:
        """Run in the workspace as an ordinary process, in a session of its own; see `Sandbox.run`."""
        return await self._supervise(command.argv, command, stdout=stdout, stderr=stderr, timeout=timeout)


class ProcessSandboxes:
    """Makes `process` sandboxes in directories below `root`."""

    kind = "process"

    def __init__(self, root: Path) -> None:
        self._root = root
        if sys.platform != "linux":
            _log.warning("on %s a process that detaches itself and clears its environment can outlive its session", sys.platform)

    async def create(self, name: str) -> Sandbox:
        """A new sandbox. Its directory carries `name` and something random, so a name can be used again."""
        place = make_place(self._root, name)
        paths = {part: str(place / part) for part in ("workspace", "home", "tmp")}
        return ProcessSandbox(place, **paths)
