"""Harnesses that are Python programs: pinned, with all that they depend on, in a virtual environment of their own."""

import functools
import os
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
        note: what to expect of the installation: "some 750 MB, a minute or more".
        python: the oldest Python that it takes, (major, minor); ours if that is fit, else one on the path.
        newest: the newest Python that it takes.
    """

    harness: str
    package: str
    version: str
    try_out: str
    note: str
    python: tuple[int, int] = (3, 11)
    newest: tuple[int, int] = (3, 13)

    def installed(self, cache: Path) -> bool:
        """Whether its virtual environment is complete."""
        return is_complete(self.target(cache))

    def install(self, cache: Path, report: Report) -> None:
        """Make the virtual environment; see `Harness.install`.

        Raises:
            InstallError: also where there is no fit Python.
        """
        base = self._base()
        if base is None:
            fit = _fit(self.python, self.newest)
            raise InstallError(f"{self.harness} needs Python {' or '.join(fit)}: put `python{fit[0]}` on the PATH and try again")

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

    def script(self, target: Path, name: str) -> tuple[str, ...]:
        """The command line that runs one of its scripts.

        -I: neither the workspace nor the user's packages shadow what it imports. -u: a log is worth most when the run was killed.
        """
        return str(self.interpreter(target)), "-I", "-u", str(target / "bin" / name)

    def site_packages(self, target: Path) -> Path:
        base = self._base()
        return target / "lib" / (base.name if base else "python3") / "site-packages"

    def readable(self, target: Path) -> tuple[str, ...]:
        """What a sandbox must show: the environment, and the installation behind it where it does not show that anyway."""
        base = self._base()
        behind = () if base is None or Path(base.prefix).is_relative_to("/usr") else (base.prefix,)
        return (str(target), *behind)

    def _base(self) -> "_Python | None":
        return _find(self.python, self.newest)

    def _pins(self) -> str:
        return (resources.files("polar.harnesses") / "pins" / f"{self.harness}.txt").read_text()


@dataclass(frozen=True)
class _Python:
    """A Python installation: its program, its prefix, and its name with the version (`python3.12`)."""

    program: str
    prefix: str
    name: str


@functools.cache
def _find(oldest: tuple[int, int], newest: tuple[int, int]) -> _Python | None:
    if oldest <= sys.version_info[:2] <= newest:
        return _Python(sys.executable, sys.base_prefix, f"python{sys.version_info.major}.{sys.version_info.minor}")
    for version in _fit(oldest, newest):
        for directory in os.get_exec_path():
            found = shutil.which(f"python{version}", path=directory)
            if found and (prefix := _prefix(found, version)):
                return _Python(str(Path(prefix) / "bin" / f"python{version}"), prefix, f"python{version}")
    return None


def _fit(oldest: tuple[int, int], newest: tuple[int, int]) -> tuple[str, ...]:
    """The versions from `oldest` to `newest`, as text."""
    return tuple(f"{oldest[0]}.{minor}" for minor in range(oldest[1], newest[1] + 1))


def _prefix(program: str, version: str) -> str:
    """Where a Python of that version is installed; "" if `program` is none (a shim without a version behind it).

    A shim of pyenv runs only a version that it is told to use, whichever are installed.
    """
    ask = "import sys; print('%d.%d' % sys.version_info[:2]); print(sys.base_prefix)"
    told = {**os.environ, "PYENV_VERSION": version}
    try:
        ended = subprocess.run([program, "-I", "-c", ask], env=told, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    said, _, prefix = ended.stdout.strip().partition("\n")
    fit = ended.returncode == 0 and said == version and (Path(prefix) / "bin" / f"python{version}").exists()
    return prefix if fit else ""
