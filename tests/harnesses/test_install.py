"""Installations: once, wholly or not at all."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from polar import harnesses
from polar.errors import InstallError
from polar.harnesses import install, node
from polar.harnesses.install import install_once, is_complete, pip_install, run_tool

UNREACHABLE = {
    "PIP_INDEX_URL": "http://127.0.0.1:9",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_CONFIG_FILE": "/dev/null",
    "PIP_NO_INDEX": "",
    "npm_config_registry": "http://127.0.0.1:9",
}


def quiet(_: str) -> None:
    """A report that nobody reads."""


def remains(cache: Path) -> list[str]:
    return [path.name for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in UNREACHABLE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    monkeypatch.setattr(node, "_of_the_system", lambda: None)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["pi", "mini_swe_agent"])
def test_without_a_network_the_error_says_what_to_do_and_nothing_remains(name: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(InstallError, match=r"(?s)failed: python\S* ended with status 1.*Is a package registry reachable\?"):
        harnesses.get(name).install(cache, quiet)
    assert not harnesses.get(name).installed(cache)
    assert remains(cache) == []


@pytest.mark.heavy  # it waits for npm's retries
@pytest.mark.usefixtures("no_network")
def test_npm_without_a_network_says_so_too(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    runtime = node.ensure(cache_dir, quiet)
    for name, value in {**UNREACHABLE, "npm_config_cache": str(tmp_path / "npm")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(node, "ensure", lambda *_: runtime)
    with pytest.raises(InstallError, match=r"(?s)installing pi 1.6.0 failed:.*ECONNREFUSED.*Is a package registry reachable\?"):
        harnesses.get("pi").install(tmp_path / "cache", quiet)
    assert remains(tmp_path / "cache") == []


def test_what_an_interrupted_installation_left_is_built_anew(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    target.mkdir()
    (target / "half").touch()
    install_once(target, lambda directory: (directory / "whole").touch(), quiet)
    assert is_complete(target)
    assert sorted(path.name for path in target.iterdir()) == [".polar-complete", "whole"]
    install_once(target, lambda _: pytest.fail("built twice"), quiet)


def test_two_processes_install_once(tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
from polar.harnesses.install import install_once
def build(directory):
    with Path({str(tmp_path / "built")!r}).open("a") as log: log.write("x")
    time.sleep(1)
install_once(Path({str(tmp_path)!r}) / "cache" / "thing", build, print)
"""
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=30)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert (tmp_path / "built").read_text() == "x"
    assert "waiting for another process that installs thing" in "".join(said)


def test_an_interruption_kills_the_tool_and_its_children_and_leaves_nothing(tmp_path: Path) -> None:
    nap = f"98{time.monotonic_ns() % 10**9}"
    program = f"""
import signal
from pathlib import Path
from polar.harnesses.install import install_once, run_tool
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests in the background has it ignored
def build(directory):
    (directory / "half").touch()
    run_tool("napping", ["sh", "-c", "sleep {nap} & sleep {nap}"])
install_once(Path({str(tmp_path)!r}) / "thing", build, print)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    while len(sleeping(nap)) < 2:
        time.sleep(0.05)
    psutil.Process(process.pid).send_signal(2)
    assert process.wait(10) != 0
    assert sleeping(nap) == []
    assert not (tmp_path / "thing").exists()


def sleeping(nap: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", nap]]


def test_a_tool_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "TIMEOUT", 0.3)
    with pytest.raises(InstallError, match=r"(?s)napping failed: sh did not end within .* s after saying\n  hello\n"):
        run_tool("napping", ["sh", "-c", "echo hello; sleep 600"])


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("npm error code ENOSPC", "The disk is full"),
        ("OSError: [Errno 28] No space left on device", "The disk is full"),
        ("npm error code ENOTFOUND", "Is a package registry reachable"),
        ("ReadTimeoutError: Read timed out.", "Is a package registry reachable"),
        ("npm error code ETARGET\nnpm error notarget No matching version found", "does not serve this version"),
        ("ERROR: No matching distribution found for x==1", "does not serve this version"),
    ],
)
def test_the_advice_follows_from_what_the_tool_said(said: str, advice: str) -> None:
    with pytest.raises(InstallError, match=advice):
        run_tool("trying", ["sh", "-c", f"echo '{said}'; exit 1"])


def test_a_disk_that_cannot_be_written_is_an_install_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InstallError, match="Is there room, and may you write there"):
        install_once(tmp_path / "file" / "thing", lambda _: None, quiet)


def test_a_python_without_pip_and_uv_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InstallError, match="has neither pip nor uv"):
        pip_install("installing x", ["x"])


def fake_node(directory: Path, version: str) -> None:
    directory.mkdir()
    (directory / "npm-cli.js").touch(0o755)
    (directory / "npm").symlink_to("npm-cli.js")
    (directory / "node").write_text(f"#!/bin/sh\necho {version}\n")
    (directory / "node").chmod(0o755)


@pytest.mark.parametrize(("version", "taken"), [("v22.19.0", True), ("v24.1.0", True), ("v22.18.9", False), ("v20.20.2", False)])
def test_the_systems_node_is_taken_if_it_is_new_enough(
    version: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_node(tmp_path / "bin", version)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    node._of_the_system.cache_clear()
    found = node.find(tmp_path / "cache")
    node._of_the_system.cache_clear()
    assert (found is not None) == taken
    if found is not None:
        assert found.readable == (str(tmp_path / "bin" / "node"),)
