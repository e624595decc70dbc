"""Which Python a harness gets."""

import re
import sys
from pathlib import Path

import pytest

from polar.errors import InstallError
from polar.harnesses import venv
from polar.harnesses.venv import PythonPackage

PACKAGE = PythonPackage("none", "none", "1", "", "", python=(3, 98), newest=(3, 99))
TARGET = Path("/cache/none-1")
PINS = Path(venv.__file__).parent / "pins"


@pytest.fixture(autouse=True)
def fresh() -> None:
    venv._find.cache_clear()


def program(path: Path, line: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


def python(prefix: Path, version: str) -> Path:
    """A Python as far as it is asked."""
    return program(prefix / "bin" / f"python{version}", f"echo {version}; echo {prefix}")


def on_path(monkeypatch: pytest.MonkeyPatch, *directories: Path) -> None:
    monkeypatch.setenv("PATH", ":".join(map(str, directories)))


def test_the_python_that_runs_polar_is_taken_if_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python(tmp_path / "new", "3.99")
    on_path(monkeypatch, tmp_path / "new" / "bin")
    ours = f"python{sys.version_info.major}.{sys.version_info.minor}"
    package = PythonPackage("none", "none", "1", "", "", python=(3, 11), newest=(3, 99))
    assert package.site_packages(TARGET) == TARGET / "lib" / ours / "site-packages"


def test_one_on_the_path_is_taken_with_its_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python(tmp_path / "new", "3.99")
    on_path(monkeypatch, tmp_path / "new" / "bin")
    assert PACKAGE.readable(TARGET) == (str(TARGET), str(tmp_path / "new"))
    assert PACKAGE.site_packages(TARGET) == TARGET / "lib" / "python3.99" / "site-packages"


def test_the_oldest_that_fits_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python(tmp_path / "new", "3.99")
    python(tmp_path / "old", "3.98")
    on_path(monkeypatch, tmp_path / "new" / "bin", tmp_path / "old" / "bin")
    assert PACKAGE.readable(TARGET)[1] == str(tmp_path / "old")


@pytest.mark.parametrize("line", ["echo 'command not found' >&2; exit 127", "echo 3.11; echo /usr", "echo 3.98; echo /nowhere"])
def test_a_shim_without_that_version_behind_it_is_passed_over(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "shims" / "python3.98", line)
    python(tmp_path / "real", "3.98")
    on_path(monkeypatch, tmp_path / "shims", tmp_path / "real" / "bin")
    assert PACKAGE.readable(TARGET)[1] == str(tmp_path / "real")


def test_a_shim_of_pyenv_is_told_which_version_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = python(tmp_path / "versions" / "3.98.1", "3.98")
    program(tmp_path / "shims" / "python3.98", f'[ "$PYENV_VERSION" = 3.98 ] && exec {real} "$@"; exit 127')
    on_path(monkeypatch, tmp_path / "shims", Path("/bin"))
    assert PACKAGE.readable(TARGET)[1] == str(tmp_path / "versions" / "3.98.1")


def test_without_one_the_error_says_which_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path(monkeypatch, tmp_path)
    with pytest.raises(InstallError, match=r"none needs Python 3\.98 or 3\.99: put `python3\.98` on the PATH"):
        PACKAGE.install(tmp_path / "cache", print)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("pins", sorted(PINS.glob("*.txt")), ids=lambda path: path.stem)
def test_every_pin_is_a_version_and_nothing_else(pins: Path) -> None:
    lines = [line for line in pins.read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+( ; .+)?", line)] == []
