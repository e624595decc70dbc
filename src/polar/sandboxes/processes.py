"""Starts a command under `supervisor.py`, and waits for it, ends it, and makes sure of its end, whatever happens meanwhile."""

import asyncio
import contextlib
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import msgspec
import psutil

from polar.errors import SandboxError
from polar.sandboxes import supervisor
from polar.sandboxes.protocol import Exit

OUTPUT_LIMIT = 64 * 1024 * 1024  # bytes of each stream that reach its file
GRACE = 2.0  # seconds between SIGTERM and SIGKILL
SUPERVISOR_PATIENCE = GRACE + supervisor.UNKILLABLE_AFTER + 5.0  # seconds it may take to answer a stop
MARK = "POLAR_COMMAND"  # in the environment of all that a command starts; finds what escaped the supervisor


class _Answer(msgspec.Struct):
    status: int = 0
    error: str = ""


class Running:
    """A command under its supervisor: `start`, then exactly one `wait`.

    Attributes:
        ended: set when nothing of the command is alive.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, mark: str) -> None:
        self._process, self._control, self._mark = process, control, mark
        self.ended = asyncio.Event()
        # Plain futures and a reader, no tasks: whoever cancels all tasks of a loop must not cancel the way to the end.
        self._loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[_Answer | None] = self._loop.create_future()
        self._received = b""
        self._loop.add_reader(control, self._receive)

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdin: str,
        stdout: Path,
        stderr: Path,
        wrapped: bool = False,
        pass_fds: tuple[int, ...] = (),
    ) -> "Running":
        """Start `argv` with exactly `env`.

        Args:
            wrapped: `argv` is a wrapper (bwrap) around the command, which must not see the SIGTERM that asks the command to end.
            pass_fds: file descriptors that `argv` inherits.

        Raises:
            SandboxError: it cannot be started, for example because an argument is too long.
        """
        mark = uuid4().hex
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        kind = "wrapped" if wrapped else "bare"
        program = [sys.executable, "-I", "-S", supervisor.__file__, str(theirs.fileno()), str(OUTPUT_LIMIT), str(GRACE), kind]
        try:
            with theirs, _file_with(stdin) as given, stdout.open("wb") as out, stderr.open("wb") as err:
                process = subprocess.Popen(
                    [*program, *argv],
                    stdin=given,
                    stdout=out,
                    stderr=err,
                    env={**env, MARK: mark},
                    cwd=cwd,
                    pass_fds=(theirs.fileno(), *pass_fds),
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            ours.close()
            raise SandboxError(f"{argv[0]} cannot be started: {error}") from error
        return cls(process, ours, mark)

    def stop(self) -> None:
        """Ask the supervisor to end everything; `wait` then returns soon."""
        with contextlib.suppress(OSError):  # it has ended already
            self._control.send(b"stop")

    async def wait(self, timeout: float) -> Exit:
        """Wait for the end, at most `timeout` seconds. Nothing is alive after this, even when it is cancelled.

        Raises:
            SandboxError: the supervisor died or could not end the command.
        """
        timed_out = False
        try:
            done, _ = await asyncio.wait({self._answered}, timeout=timeout)
            timed_out = not done
        finally:
            try:
                answer = await self._settle()
            finally:
                self.ended.set()
        if answer.error:
            raise SandboxError(answer.error)
        return Exit(answer.status, timed_out)

    async def _settle(self) -> _Answer:
        """Make the end come, through any cancellation, and say how it came."""
        self.stop()
        cancelled = await _outlast(self._answered, SUPERVISOR_PATIENCE)
        if not self._answered.done():  # it was stopped (SIGSTOP) by what it should watch
            self._process.kill()
        ending = self._loop.run_in_executor(None, self._bury)
        for step in (self._answered, ending):
            cancelled = await _outlast(step, math.inf) or cancelled
        answer = self._answered.result()
        if cancelled:
            raise cancelled
        ending.result()
        if answer is not None:
            return answer
        if self._process.returncode < 0:  # the command killed its supervisor
            return _Answer(self._process.returncode)
        return _Answer(error="the supervisor of the command broke; what it said is at the end of the command's error output")

    def _bury(self) -> None:
        self._process.wait()
        if not self._received or sys.platform != "linux":
            kill_marked(self._mark)

    def _receive(self) -> None:
        """Collect the supervisor's answer up to its end, which may come without one."""
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self._received += data
        if not data:
            self._loop.remove_reader(self._control)
            self._control.close()
            self._answered.set_result(msgspec.json.decode(self._received, type=_Answer) if self._received else None)


async def _outlast(future: "asyncio.Future[Any]", timeout: float) -> asyncio.CancelledError | None:
    """Wait for `future`; a cancellation meanwhile is put off, and returned."""
    cancelled: asyncio.CancelledError | None = None
    deadline = time.monotonic() + timeout
    while not future.done() and (left := deadline - time.monotonic()) > 0:
        try:
            await asyncio.wait({future}, timeout=None if left == math.inf else left)
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


def kill_marked(mark: str) -> None:
    """Kill every process of this machine whose environment carries `mark`, until there is none.

    Raises:
        SandboxError: one does not die.
    """
    deadline = time.monotonic() + supervisor.UNKILLABLE_AFTER
    while found := [process for process in psutil.process_iter() if _carries(process, mark)]:
        if time.monotonic() > deadline:
            raise SandboxError(f"process {found[0].pid}, which a command started, could not be killed")
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=0.05)


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False  # gone meanwhile, or another user's


def _file_with(text: str) -> IO[bytes]:
    """A file to read `text` from, which vanishes when it is closed."""
    if not text:
        return Path(os.devnull).open("rb")
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(text.encode())
    file.seek(0)
    return file
