"""Which weights sampled a generation, where the route that gave it does not tell.

The server is asked before and after. Versions only ever grow, so two equal answers prove that it was one all the while, and so
does any earlier answer instead of the one before. Two that differ prove nothing about a token, and nothing is guessed.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable

from polar.errors import CaptureError
from polar.specs import VersionSpan

FRESH_SECONDS = 0.5  # an answer as old serves as the one before: a new update within it would fail the call without need


class Versions:
    """The versions of one server's weights.

    Args:
        ask: the version that the server names; None if it names none. Then it is 0, the weights it started with, until `name`.

    Attributes:
        known: the latest version that the server is known to have named; None for a server that names none.
    """

    def __init__(self, ask: Callable[[], Awaitable[int | None]]) -> None:
        self.known: int | None = None
        self._ask = ask
        self._named = 0
        self._silent = False
        self._asked_at = -math.inf
        self._next: asyncio.Task[int] | None = None
        self._asking = asyncio.Lock()

    async def before(self) -> int:
        """The version before a generation begins."""
        if asyncio.get_running_loop().time() - self._asked_at < FRESH_SECONDS:
            return self._named if self.known is None else self.known
        return await self.now()

    async def since(self, before: int, sampled: int) -> tuple[VersionSpan, ...]:
        """The one span over `sampled` tokens of a generation that has ended.

        Raises:
            CaptureError: W01, the weights changed in the meantime.
        """
        after = await self.now()
        if after != before:
            raise CaptureError(
                "W01",
                f"the weights went from version {before} to {after} in the course of a generation, and this route does not tell "
                "which tokens are whose; generate from ids on vLLM's token route, or change weights when nothing runs",
            )
        return (VersionSpan(0, sampled, after),) if sampled else ()

    async def now(self) -> int:
        """The version at a moment after this call; whoever waits for an answer that is still to be asked for shares it."""
        if self._silent:
            return self._named
        if self._next is None:
            self._next = asyncio.create_task(self._answer())
        return await asyncio.shield(self._next)

    async def learn(self) -> None:
        """Ask, also a server that named none before: it may be another by now."""
        self._silent = False
        await self.now()

    def name(self, version: int) -> None:
        """Weights are `version` from now on."""
        self._named = version
        self._asked_at = -math.inf
        if self.known is not None:
            self.known = version

    def seen(self, version: int) -> None:
        """A generation ended under `version`."""
        if self.known is not None and version > self.known:
            self.known = version

    async def _answer(self) -> int:
        async with self._asking:
            self._next = None
            self.known = await self._ask()
            self._silent = self.known is None
            self._asked_at = asyncio.get_running_loop().time()
        return self._named if self.known is None else self.known
