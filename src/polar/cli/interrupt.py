"""Ctrl-C: once stops cleanly, twice at once."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

SHOW_CURSOR = "\x1b[?25h"


class Stopped(Exception):
    """The work was stopped by a signal. `status` is what the process should exit with."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def drive(work: Coroutine[object, object, T], stopping: Callable[[], None]) -> T:
    """Run `work` in an event loop of its own. SIGINT or SIGTERM cancels it, after `stopping`; a second one ends the process.

    Raises:
        Stopped: it was cancelled, and has cleaned up.
    """
    return asyncio.run(_drive(work, stopping))


async def _drive(work: Coroutine[object, object, T], stopping: Callable[[], None]) -> T:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    received: list[int] = []

    def stop() -> None:
        stopping()
        task.cancel()

    def on_signal(number: int, frame: FrameType | None) -> None:
        # Not `loop.add_signal_handler`: a loop that is busy or hangs would not hear the second one.
        if received:
            _leave(number)
        received.append(number)
        loop.call_soon_threadsafe(stop)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise Stopped(received[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int) -> None:
    """End now. Engine and harnesses die with us, and everything committed is on disk."""
    if sys.stderr.isatty():
        os.write(2, SHOW_CURSOR.encode())
    os._exit(128 + number)
