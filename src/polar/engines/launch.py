"""Starts an engine as a process of its own, and makes sure that it ends with ours.

Its output goes straight to a log file: nobody has to pump a pipe, and an engine whose parent was killed cannot block on one.
"""

import asyncio
import ctypes
import os
import re
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from polar.engines.keys import KEY_VARIABLE
from polar.engines.vllm import VllmEngine
from polar.errors import EngineError, UsageError

READY = re.compile(rb"^polar engine ready on (http://\S+)", re.MULTILINE)
READY_SECONDS = 300.0  # a first start builds the model's files
POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0
LAST_LINES = 20
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True)
class EngineProcess:
    """An engine that runs.

    Attributes:
        model_dir: directory of its model's tokenizer.
        died: completes with the exit status when the process ends, for whatever reason.
        key: what its routes ask for; empty if they ask for none.
    """

    url: str
    model_dir: Path
    pid: int
    log: Path
    died: asyncio.Future[int]
    key: str = field(repr=False)

    async def wait_dead(self) -> EngineError:
        """Wait for the process to end; the error says how, with the last lines of its log. A runner races this with its work."""
        return _death(await asyncio.shield(self.died), self.log)


@asynccontextmanager
async def embedded_engine(model: str, *, log: Path, timeout: float = READY_SECONDS) -> AsyncIterator[EngineProcess]:
    """The embedded engine with `model`, on a free port of loopback, behind a key of its own; see `engine_process`."""
    command = [sys.executable, "-m", "polar.engines.embedded", model, "--port", "0"]
    async with engine_process(command, log=log, key=secrets.token_urlsafe(24), timeout=timeout) as process:
        yield process


@asynccontextmanager
async def engine_process(
    command: Sequence[str], *, log: Path, key: str = "", timeout: float = READY_SECONDS
) -> AsyncIterator[EngineProcess]:
    """Run `command`, which prints `polar engine ready on URL` once it serves vLLM's routes.

    On exit it gets SIGTERM, and SIGKILL after a grace time. On Linux it dies with this process even where that is killed -9;
    so start it from a thread that lives on, the kernel watches that thread.

    Args:
        log: file that its output is appended to.
        key: given to it in `$POLAR_ENGINE_KEY`, for its routes to ask for; empty leaves them open.
        timeout: seconds until it must be ready.

    Raises:
        UsageError: the log cannot be written.
        EngineError: it died first, or was not ready in time; with the last lines of its log.
    """
    with _opened(log) as output:
        before = output.tell()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, KEY_VARIABLE: key},  # set even if empty: the key of another engine is not for this one
            start_new_session=True,  # Ctrl-C is for us; we end the engine when what runs on it has been wound up
            preexec_fn=_die_with_parent(),
        )
    died = asyncio.ensure_future(process.wait())
    try:
        url = await _ready(died, log, before, timeout)
        yield EngineProcess(url, await _model_dir(url, key), process.pid, log, died, key)
    finally:
        await _end(process, died)


def _opened(log: Path) -> BinaryIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab")
    except OSError as error:
        raise UsageError(
            f"cannot write the engine's log {log}: {error.strerror}; choose a directory that you can write to"
        ) from None


async def _ready(died: asyncio.Future[int], log: Path, before: int, timeout: float) -> str:
    deadline = asyncio.get_running_loop().time() + timeout
    while (match := READY.search(_read(log, before))) is None:
        if died.done():
            raise _death(died.result(), log)
        if asyncio.get_running_loop().time() > deadline:
            raise EngineError(f"the engine was not ready within {timeout:.0f} s; {_last_lines(log)}")
        await asyncio.wait({died}, timeout=POLL_SECONDS)
    return match[1].decode()


async def _model_dir(url: str, key: str) -> Path:
    engine = VllmEngine(url, key)
    try:
        return Path((await engine.info()).model_path)
    finally:
        await engine.close()


async def _end(process: asyncio.subprocess.Process, died: asyncio.Future[int]) -> None:
    if not died.done():
        process.terminate()
        await asyncio.wait({died}, timeout=GRACE_SECONDS)
    if not died.done():
        process.kill()
    await died


def _die_with_parent() -> Callable[[], None] | None:
    """A hook for the child, before it becomes the engine. Loaded here: after a fork, imports may hang."""
    if sys.platform != "linux":
        return None
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def hook() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # killed between the fork and the line above
            os._exit(1)

    return hook


def _death(status: int, log: Path) -> EngineError:
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return EngineError(f"the engine died with {how}; {_last_lines(log)}")


def _last_lines(log: Path) -> str:
    lines = _read(log, 0).decode(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join([f"the last lines of {log}:", *lines])


def _read(log: Path, start: int) -> bytes:
    with log.open("rb") as file:
        file.seek(start)
        return file.read()
