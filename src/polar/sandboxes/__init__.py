"""Where the files of a session live and its commands run."""

import logging
from pathlib import Path
from typing import Literal

from polar.errors import UsageError
from polar.sandboxes import bubblewrap
from polar.sandboxes.bubblewrap import BubblewrapSandboxes
from polar.sandboxes.process import ProcessSandboxes
from polar.sandboxes.protocol import Command, Exit, Sandbox, SandboxFactory, shell

__all__ = ["Command", "Exit", "Sandbox", "SandboxFactory", "SandboxKind", "choose", "shell"]

SandboxKind = Literal["auto", "process", "bubblewrap"]

_log = logging.getLogger(__name__)


def choose(kind: SandboxKind, root: Path) -> SandboxFactory:
    """The factory for sandboxes of `kind` below `root`; `auto` is bubblewrap where it works, else process.

    Raises:
        UsageError: bubblewrap is asked for and cannot run here.
    """
    if kind == "process":
        return ProcessSandboxes(root)
    problem = bubblewrap.problem()
    if not problem:
        return BubblewrapSandboxes(root)
    if kind == "auto":
        _log.warning("sandboxes are plain processes, because bubblewrap cannot run here: %s", problem)
        return ProcessSandboxes(root)
    raise UsageError(
        f"bubblewrap cannot run here: {problem}. Install it (`apt-get install bubblewrap`), allow unprivileged user namespaces "
        "(`sysctl kernel.apparmor_restrict_unprivileged_userns=0` on Ubuntu), or use `process` sandboxes"
    )
