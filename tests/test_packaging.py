"""What a fresh clone is set up with."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from polar.version import __version__

ROOT = Path(__file__).parent.parent
PIN = re.compile(r"([a-z0-9-]+)==\S+( ; .+)?")


def test_every_dependency_is_pinned_and_no_host_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    for name in ("constraints.txt", "constraints-vllm.txt", "constraints-verl.txt"):
        lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
        pins = [PIN.fullmatch(line) for line in lines]
        assert [line for line, pin in zip(lines, pins, strict=True) if pin is None] == []
        if name == "constraints.txt":
            pinned = {pin[1] for pin in pins if pin}
            assert {re.split(r"[^A-Za-z0-9-]", line)[0] for line in wanted} - pinned == set()


def test_the_version_has_one_source() -> None:
    assert __version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    done = subprocess.run([Path(sys.executable).with_name("polar"), "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"polar {__version__}\n"


def test_a_machine_without_a_fit_python_is_told_so(tmp_path: Path) -> None:
    done = venv(tmp_path / "venv", python="false")
    assert done.returncode == 1
    assert done.stderr.startswith("error: Polar needs Python 3.11, 3.12 or 3.13; found none as: false.")


def test_a_python_that_makes_no_environments_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\n""")
    python.chmod(0o755)
    done = venv(tmp_path / "venv", python=str(python))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {python} cannot make virtual environments")


def test_a_working_environment_is_left_alone() -> None:
    done = venv(ROOT / ".venv", python="false")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def venv(target: Path, python: str) -> subprocess.CompletedProcess[str]:
    script = [str(ROOT / "tools" / "venv.sh"), str(target)]
    return subprocess.run(script, env={**os.environ, "PYTHON": python}, capture_output=True, text=True, check=False)
