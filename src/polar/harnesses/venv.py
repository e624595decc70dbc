"""Harnesses that are Python programs: pinned, with all that they depend on, in a virtual environment of their own."""

import functools
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from polar.errors import InstallError
from polar.harnesses.install import install_once, is_complete, pip_install, recipe_digest, run_tool, size_text
from polar.harnesses.protocol import Report


@dataclass(frozen=True)
class PythonPackage:
    """One package at a pinned version; `pins/{harness}.txt` pins what it depends on.

    Attributes:
        try_out: a statement that imports what the harness runs.
        python: the oldest Python that it takes, (major, minor); ours if that is new enough, else one on the path.
        note: what to expect of the installation: "some 750 MB, a minute or more".
    """

    harness: str
    package: str
    version: str
    try_out: str
    note: str
    python: tuple[int, int] = (3, 11)

    def installed(self, cache: Path) -> bool:
        """Whether its virtual environment is complete."""
        return is_complete(self.target(cache))

    def install(self, cache: Path, report: Report) -> None:
        """Make the virtual environment; see `Harness.install`.

        Raises:
            InstallError: also where no Python is new enough.
        """
        base = self._base()
        if base is None:
            wanted = ".".join(map(str, self.python))
            raise InstallError(f"{self.harness} needs Python {wanted} or newer: put `python{wanted}` on the PATH and try again")

        def build(directory: Path) -> None:
            what = f"installing {self.harness} {self.version}"
            report(f"{what} from PyPI: {self.note}")
            # Without pip, which a system's Python cannot always put into an environment; ours installs from outside.
            run_tool(what, [base.program, "-m", "venv", "--without-pip", str(directory)])
            pins = directory / "constraints.txt"
            pins.write_text(self._pins())
            python = self.interpreter(directory)
            pip_install(what, [f"{self.package}=={self.version}", "--constraint", str(pins)], python=python)
            run_tool(f"starting {self.harness}", [str(python), "-I", "-c", self.try_out])
            report(f"{self.harness} {self.version} is installed ({size_text(directory)})")

        install_once(self.target(cache), build, report)

    def target(self, cache: Path) -> Path:
        """Where its virtual environment is, or will be."""
        base = self._base()
        digest = recipe_digest(self.version, self._pins(), *((base.name, base.prefix) if base else ()))
        return cache.absolute() / "harnesses" / f"{self.harness}-{self.version}-{digest}"

    def interpreter(self, target: Path) -> Path:
        return target / "bin" / "python"

    def site_packages(self, target: Path) -> Path:
        base = self._base()
        return target / "lib" / (base.name if base else "python3") / "site-packages"

    def readable(self, target: Path) -> tuple[str, ...]:
        """What a sandbox must show: the environment, and the installation behind it where it does not show that anyway."""
        base = self._base()
        behind = () if base is None or Path(base.prefix).is_relative_to("/usr") else (base.prefix,)
        return (str(target), *behind)

    def _base(self) -> "_Python | None":
        return _find(self.python)

    def _pins(self) -> str:
        return (resources.files("polar.harnesses") / "pins" / f"{self.harness}.txt").read_text()


@dataclass(frozen=True)
class _Python:
    """A Python installation: its program, its prefix, and its name with the version (`python3.12`)."""

    program: str
    prefix: str
    name: str


@functools.cache
def _find(oldest: tuple[int, int]) -> _Python | None:
    if sys.version_info[:2] >= oldest:
        return _Python(sys.executable, sys.base_prefix, f"python{sys.version_info.major}.{sys.version_info.minor}")
    for minor in range(oldest[1], oldest[1] + 2):
        name = f"python{oldest[0]}.{minor}"
        if (found := shutil.which(name)) and (prefix := _prefix(found)):
            return _Python(str(Path(prefix) / "bin" / name), prefix, name)
    return None


def _prefix(program: str) -> str:
    """Where a Python is installed; "" if it does not run (a shim without a version behind it)."""
    try:
        ended = subprocess.run(
            [program, "-I", "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""
