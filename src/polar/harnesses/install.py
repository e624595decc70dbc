"""Installs programs into Polar's cache: once, wholly or not at all, and never twice at the same time.

What is installed is complete when its directory holds the marker; a directory without it is what an interrupted
installation left, and is removed. Programs are built at their final path, because virtual environments contain it.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from polar.errors import InstallError
from polar.harnesses.protocol import Report

_MARKER = ".polar-complete"
_LAST_LINES = 12
TIMEOUT = 1800.0  # seconds for one tool; a gigabyte over a slow line takes its time
NETWORK_TIMEOUT = 30  # seconds without an answer from a registry
NETWORK_RETRIES = 2


def recipe_digest(*parts: str) -> str:
    """Ten hexadecimal digits that change when any part of a recipe does."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]


def is_complete(target: Path) -> bool:
    """Whether `target` was installed to its end."""
    return (target / _MARKER).is_file()


def install_once(target: Path, build: Callable[[Path], None], report: Report) -> None:
    """Have `build` fill the directory `target`, unless it is complete. Other processes wait meanwhile.

    Raises:
        InstallError: from `build`, or the disk is full; nothing but an empty lock file remains.
    """
    if is_complete(target):
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f"{target.name}.lock"), report):
            if not is_complete(target):
                _build(target, build)
    except OSError as error:
        raise InstallError(f"{target} cannot be installed: {error}. Is there room, and may you write there?") from error


def _build(target: Path, build: Callable[[Path], None]) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    try:
        build(target)
        (target / _MARKER).touch()
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


@contextlib.contextmanager
def _lock(path: Path, report: Report) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process that installs {path.stem}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_tool(what: str, argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """Run an installer quietly. It and its children end with this call, an interrupted one too.

    Args:
        what: what is done, for the message: "installing pi 1.6.0".
        env: its whole environment; None for this process's own.

    Raises:
        InstallError: with the tool's last lines and what to do.
    """
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=cwd, env=env)
        except OSError as error:
            raise InstallError(f"{what} failed: {argv[0]} cannot be run: {error.strerror}") from error
        try:
            status: int | None = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill(process)
        log.seek(0)
        output = log.read().decode(errors="replace")
    if status != 0:
        reason = f"did not end within {TIMEOUT:.0f} s" if status is None else f"ended with status {status}"
        lines = "\n".join(f"  {line}" for line in output.strip().splitlines()[-_LAST_LINES:])
        raise InstallError(f"{what} failed: {Path(argv[0]).name} {reason} after saying\n{lines}\n{advice(output)}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill an installer that has not ended, with its children. It shares our group, so a terminal's Ctrl-C reaches it as well."""
    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    process.kill()
    process.wait()


def advice(output: str) -> str:
    """What to do about a failed installation, by what the tool said."""
    said = output.lower()
    if "no space left" in said or "enospc" in said:
        return "The disk is full: make room, or set POLAR_CACHE to a directory on another one."
    unreachable = ("connect", "enotfound", "eai_again", "etimedout", "name resolution", "timed out", "network")
    if any(word in said for word in unreachable):
        return (
            "Is a package registry reachable? pip takes PIP_INDEX_URL and npm npm_config_registry, for a mirror; "
            "HTTPS_PROXY names a proxy. Then try again."
        )
    return "If the registry does not serve this version, use one that does: PIP_INDEX_URL for pip, npm_config_registry for npm."


def pip_install(what: str, arguments: Sequence[str], *, python: Path | None = None, into: Path | None = None) -> None:
    """Run `pip install`, or uv's where this Python has no pip, either for another interpreter or into a plain directory.

    Raises:
        InstallError: there is neither, or the installation failed.
    """
    if importlib.util.find_spec("pip"):
        pip = [sys.executable, "-m", "pip", *(("--python", str(python)) if python else ()), "install"]
        options = [
            "--no-input",
            "--disable-pip-version-check",
            "--timeout",
            str(NETWORK_TIMEOUT),
            "--retries",
            str(NETWORK_RETRIES),
        ]
    elif uv := shutil.which("uv"):
        pip = [uv, "pip", "install", "--python", str(python or sys.executable)]
        options = ["--no-progress", "--compile-bytecode"]
    else:
        raise InstallError(f"{what} failed: {sys.executable} has neither pip nor uv. Install one: `python -m ensurepip`, or uv")
    target = ["--target", str(into)] if into else []
    run_tool(what, [*pip, *options, *target, *arguments])


def size_text(directory: Path) -> str:
    """The size of a directory as people read it: `168 MB`."""
    total = sum(entry.stat(follow_symlinks=False).st_size for entry in _files(directory))
    return f"{total / 1e6:.0f} MB"


def _files(directory: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            else:
                yield entry
