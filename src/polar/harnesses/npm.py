"""Harnesses that are npm packages: installed from a lock file, byte for byte, into a directory of their own."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec

from polar.errors import InstallError
from polar.harnesses import node
from polar.harnesses.install import install_once, is_complete, recipe_digest, run_tool, size_text
from polar.harnesses.protocol import Report


@dataclass(frozen=True)
class NpmPackage:
    """One package at the version that `pins/{harness}.lock.json` pins, with all that it depends on.

    Attributes:
        harness: the harness's name, which is also the lock file's.
        package: the name on npm.
        try_out: arguments that start the installed program to no effect; the first is its path below `node_modules`.
        finish: what else is done to the directory (scripts do not run); None for nothing.
    """

    harness: str
    package: str
    version: str
    try_out: tuple[str, ...]
    finish: Callable[[Path], None] | None = None

    def installed(self, cache: Path) -> bool:
        """Whether the package and a Node.js for it are there."""
        return is_complete(self.target(cache)) and node.find(cache) is not None

    def install(self, cache: Path, report: Report) -> None:
        """Install the package, and Node.js if the system's is too old; see `Harness.install`."""
        runtime = node.ensure(cache, report)
        target = self.target(cache)
        if is_complete(target):
            return
        what = f"installing {self.harness} {self.version}"

        def build(directory: Path) -> None:
            report(f"{what} from npm")
            (directory / "package-lock.json").write_text(self._lock())
            (directory / "package.json").write_text(self._manifest())
            node.npm_ci(what, runtime, directory)
            if self.finish is not None:
                self.finish(directory)
            self._try(directory, runtime)
            report(f"{self.harness} {self.version} is installed ({size_text(directory)})")

        install_once(target, build, report)

    def _try(self, directory: Path, runtime: node.Node) -> None:
        """Start the program once, where it cannot leave files in the home of who runs Polar."""
        program = str(self.modules(directory) / self.try_out[0])
        starter = [str(runtime.node)] if program.endswith((".js", ".mjs", ".cjs")) else []
        with tempfile.TemporaryDirectory() as home:
            bare = {"PATH": os.environ.get("PATH", os.defpath), "HOME": home, "TMPDIR": home}
            run_tool(f"starting {self.harness}", [*starter, program, *self.try_out[1:]], env=bare)

    def target(self, cache: Path) -> Path:
        """Where the package is, or will be."""
        digest = recipe_digest(self._manifest(), self._lock())
        return cache.absolute() / "harnesses" / f"{self.harness}-{self.version}-{digest}"

    def modules(self, target: Path) -> Path:
        return target / "node_modules"

    def program(self, cache: Path) -> Path:
        """The installed program: what `try_out` starts."""
        return self.modules(self.target(cache)) / self.try_out[0]

    def runtime(self, cache: Path) -> node.Node:
        """The Node.js that it runs on.

        Raises:
            InstallError: there is none yet.
        """
        runtime = node.find(cache)
        if runtime is None:
            raise InstallError(f"Node.js, which {self.harness} runs on, is not installed; install the harness first")
        return runtime

    def _lock(self) -> str:
        return (resources.files("polar.harnesses") / "pins" / f"{self.harness}.lock.json").read_text()

    def _manifest(self) -> str:
        return json_text(
            {"name": f"polar-{self.harness.replace('_', '-')}", "private": True, "dependencies": {self.package: self.version}}
        )


def place_native(harness: str, directory: Path, native: str, program: str) -> Path:
    """Put the one native program that npm installed for this machine where it stands on every system.

    Args:
        native: pattern of its path below `node_modules`, in the optional package of this machine.
        program: its new path below `node_modules`.

    Raises:
        InstallError: npm installed none, or several.
    """
    modules = directory / "node_modules"
    found = sorted(modules.glob(native))
    if len(found) != 1:
        names = ", ".join(str(path.relative_to(modules)) for path in found) or "none"
        raise InstallError(f"{harness}: npm should have installed one program for this system, and installed {names}")
    return found[0].replace(modules / program)


def json_text(data: object) -> str:
    """JSON for a configuration file that people may read."""
    return msgspec.json.format(msgspec.json.encode(data)).decode() + "\n"
