"""Deltas on their way from a call to the connection that waits for it."""

import asyncio

from polar.chat import Delta


class Feed:
    """One producer, one consumer, no task and no timer per delta. The consumer sleeps only when nothing is there."""

    def __init__(self) -> None:
        self._waiting: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.ended = False
        self.hung_up = False

    @property
    def drained(self) -> bool:
        """Nothing is left, and nothing more comes."""
        return self.ended and not self._waiting

    def put(self, deltas: list[Delta]) -> None:
        if deltas:
            self._waiting.extend(deltas)
            self._wake()

    def end(self) -> None:
        """The call has an outcome; nothing more comes."""
        self.ended = True
        self._wake()

    def hang_up(self) -> None:
        """The client has gone."""
        self.hung_up = True
        self._wake()

    async def take(self, timeout: float) -> list[Delta]:
        """What has come by now; after `timeout` seconds of nothing an empty list (see also `ended` and `hung_up`)."""
        if not self._waiting and not self.ended and not self.hung_up:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            self._deadline = loop.time() + timeout
            self._timer = self._timer or loop.call_at(self._deadline, self._tick)
            await self._waiter
        taken, self._waiting = self._waiting, []
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._timer is not None and (self.ended or self.hung_up):
            self._timer.cancel()

    def _tick(self) -> None:
        """The timer of some earlier `take`: wake the consumer if its time is up, else look again when it is."""
        loop = asyncio.get_running_loop()
        self._timer = None
        if loop.time() >= self._deadline:
            self._wake()
        else:
            self._timer = loop.call_at(self._deadline, self._tick)
