"""`polar harness`: what there is, and how it gets here."""

from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.errors import InstallError
from polar.specs import HarnessProfile
from tests.cli.conftest import Polar


def test_every_harness_is_listed_with_its_version(polar: Polar) -> None:
    told = polar("harness", "list").output
    for name in harnesses.names():
        assert f" {name} " in told
        assert harnesses.get(name).version in told


def test_what_is_installed_is_left_alone(polar: Polar) -> None:
    told = polar("harness", "install", "shell")
    assert (told.exit_code, "is installed in" in told.output) == (0, True)


def test_steps_are_told(polar: Polar, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = harnesses.get("shell")
    monkeypatch.setattr(shell, "installed", lambda cache: False, raising=False)
    monkeypatch.setattr(shell, "install", lambda cache, report: report("fetching [it]"), raising=False)
    assert polar("harness", "install", "shell").output.startswith("fetching [it]\nshell")


def test_an_unknown_harness_installs_nothing(polar: Polar) -> None:
    told = polar("harness", "install", "shell", "p1")
    assert (told.exit_code, told.stdout) == (2, "")
    assert "there is no harness 'p1'" in told.stderr


def test_a_failed_install_exits_with_1(polar: Polar, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(cache: Path, report: object) -> None:
        raise InstallError("no network: npm said ENOTFOUND; check the connection and try again")

    monkeypatch.setattr(harnesses.get("shell"), "installed", lambda cache: False, raising=False)
    monkeypatch.setattr(harnesses.get("shell"), "install", fail, raising=False)
    told = polar("harness", "install", "shell")
    assert (told.exit_code, told.stderr) == (1, "error: no network: npm said ENOTFOUND; check the connection and try again\n")


def test_a_profile_is_what_a_session_is_opened_with(polar: Polar) -> None:
    told = polar("harness", "profile", "codex").output
    assert msgspec.json.decode(told, type=HarnessProfile) == harnesses.get("codex").profile
