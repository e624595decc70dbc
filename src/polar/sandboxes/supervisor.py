"""Runs one command and sees to it that nothing which the command started outlives it.

A program of its own, of the standard library alone: `supervisor.py CONTROL LIMIT GRACE KIND ARGV…`, started with the
command's working directory, environment and standard input, and with the log files as standard output and error. It is
the "child subreaper" of the command: whatever detaches itself (setsid, a double fork) becomes a child of the supervisor,
so "no child is left" means that nothing is left. It ends the command when a byte or the end of file comes on the socket
CONTROL, so the death of the process that started it is enough, and answers there with one JSON object.

On a system without subreapers (macOS) only the command's process group can be ended here; the caller looks for the rest.
"""

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
CHUNK = 65536
DROPPED = "[polar: output beyond"  # begins the last line of a log file that did not take all
UNKILLABLE_AFTER = 10.0  # seconds of SIGKILL after which a process counts as stuck in the kernel


class Stream:
    """A stream of the command on its way to a log file, which takes `limit` bytes of it and a line saying that more came."""

    def __init__(self, log: int, limit: int) -> None:
        self.source, self.sink = os.pipe()
        self.log, self.room = log, limit
        self.notice = f"\n{DROPPED} {limit} bytes was dropped]\n".encode()
        os.set_blocking(self.source, False)

    def pump(self) -> bool:
        """Move what has arrived; False at the end."""
        try:
            data = os.read(self.source, CHUNK)
        except BlockingIOError:
            return True
        kept = data[: self.room]
        self.room -= len(kept)
        self._write(kept)
        if len(kept) < len(data):
            self._write(self.notice)
            self.notice = b""
        return bool(data)

    def drain(self) -> None:
        """Move all that is left, when those who wrote are dead."""
        while select.select([self.source], [], [], 0)[0] and self.pump():
            pass

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.log, data) :]


class Supervisor:
    """One command from its start until nothing of it is left."""

    def __init__(self, control: int, limit: int, wrapped: bool) -> None:
        self.control, self.wrapped = control, wrapped
        self.streams = [Stream(1, limit), Stream(2, limit)]
        self.status: int | None = None
        self.child = 0

    def start(self, argv: list[str]) -> None:
        self.wake, wake_writer = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        # Handlers that do nothing: unlike SIG_IGN they are not inherited, and only the control socket may end us.
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self.child = os.fork()
        if self.child == 0:
            self._become(argv)
        for stream in self.streams:
            os.close(stream.sink)

    def _become(self, argv: list[str]) -> None:
        status = 126
        try:
            os.setsid()  # a group of its own: `kill 0` must not reach the supervisor
            os.dup2(self.streams[0].sink, 1)
            os.dup2(self.streams[1].sink, 2)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, which would be inherited
                signal.signal(number, signal.SIG_DFL)
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode(errors="replace"))
            status = 127 if error.errno == errno.ENOENT else 126  # as a shell says it
        finally:
            os._exit(status)

    def watch(self) -> None:
        """Until the command ends or the control socket speaks."""
        while self.status is None:
            if self._turn(None):
                return

    def terminate(self, grace: float) -> None:
        """Ask the command to end, and give it `grace` seconds."""
        for pid in self._descendants():
            if not (self.wrapped and pid == self.child):  # a wrapper that dies first would take all with it at once
                self._kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self.status is None and (left := deadline - time.monotonic()) > 0:
            self._turn(left, heed_control=False)

    def kill_all(self) -> bool:
        """Kill until no child is left; False if the kernel does not let one go."""
        deadline = time.monotonic() + UNKILLABLE_AFTER
        with contextlib.suppress(OSError):
            os.killpg(self.child, signal.SIGKILL)
        while True:
            for pid in self._descendants():
                self._kill(pid, signal.SIGKILL)
            if not self._reap():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)

    def _turn(self, timeout: float | None, *, heed_control: bool = True) -> bool:
        """Wait for anything to happen and deal with it. True if the control socket spoke."""
        sources = {stream.source: stream for stream in self.streams}
        control = [self.control] if heed_control else []
        ready, _, _ = select.select([*sources, self.wake, *control], [], [], timeout)
        for source in ready:
            if source in sources and not sources[source].pump():
                self.streams.remove(sources[source])
        if self.wake in ready:
            os.read(self.wake, CHUNK)
        self._reap()
        return self.control in ready

    def _reap(self) -> bool:
        """Collect the dead; False if there is no child at all any more."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.child:
                self.status = os.waitstatus_to_exitcode(status)

    def _descendants(self) -> list[int]:
        children: dict[int, list[int]] = {}
        try:
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        except OSError:  # no /proc (macOS)
            return [self.child] if self.status is None else []
        for pid in pids:
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/stat", "rb") as stat:
                    parent = int(stat.read().rpartition(b")")[2].split()[1])  # the name before it may hold anything
                children.setdefault(parent, []).append(pid)
        found, frontier = [], [os.getpid()]
        while frontier:
            below = children.get(frontier.pop(), [])
            found += below
            frontier += below
        return found

    @staticmethod
    def _kill(pid: int, number: int) -> None:
        with contextlib.suppress(OSError):  # already dead, or no longer ours to kill; the loop finds out which
            os.kill(pid, number)


def become_subreaper() -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def supervise(control: int, limit: int, grace: float, wrapped: bool, argv: list[str]) -> dict[str, int | str]:
    """Run `argv` to its end. The answer holds its `status`, or an `error` of the machine."""
    become_subreaper()
    supervisor = Supervisor(control, limit, wrapped)
    streams = list(supervisor.streams)
    supervisor.start(argv)
    error = ""
    try:
        supervisor.watch()
        if supervisor.status is None:
            supervisor.terminate(grace)
    except OSError as caught:
        error = str(caught)
    if not supervisor.kill_all() or supervisor.status is None:
        return {"error": "a process could not be killed"}
    try:
        for stream in streams:
            stream.drain()
    except OSError as caught:
        error = str(caught)
    return {"error": f"the output cannot be written: {error}"} if error else {"status": supervisor.status}


def main() -> None:
    # The number that the socket has in a large server may be beyond what select() takes; here it gets a low one.
    control = os.dup(int(sys.argv[1]))
    os.close(int(sys.argv[1]))
    answer = supervise(control, int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "wrapped", sys.argv[5:])
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(control, json.dumps(answer).encode())


if __name__ == "__main__":
    main()
