"""Deltas on their way from a call to the connection that waits for it."""

import asyncio

from polar.chat import Delta


class Feed:
    """One producer, one consumer, no task per delta. The consumer sleeps only when nothing is there."""

    def __init__(self) -> None:
        self._waiting: list[Delta] = []
        self._stirred = asyncio.Event()
        self.ended = False
        self.hung_up = False

    @property
    def drained(self) -> bool:
        """Nothing is left, and nothing more comes."""
        return self.ended and not self._waiting

    def put(self, deltas: list[Delta]) -> None:
        if deltas:
            self._waiting.extend(deltas)
            self._stirred.set()

    def end(self) -> None:
        """The call has an outcome; nothing more comes."""
        self.ended = True
        self._stirred.set()

    def hang_up(self) -> None:
        """The client has gone."""
        self.hung_up = True
        self._stirred.set()

    async def take(self, timeout: float) -> list[Delta]:
        """What has come by now; after `timeout` seconds of nothing an empty list (see also `ended` and `hung_up`)."""
        if not self._waiting and not self.ended and not self.hung_up:
            self._stirred.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._stirred.wait()
            except TimeoutError:
                return []
        taken, self._waiting = self._waiting, []
        return taken
