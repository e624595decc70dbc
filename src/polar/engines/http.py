"""One inference server as its client sees it: what a route answers, or the error that says why not."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import TypeVar

import msgspec
from msgspec import Struct

from polar.engines.keys import KEY_VARIABLE, shown
from polar.engines.streaming import Origin, Reply
from polar.errors import EngineError, EngineRefusal

CONNECT_SECONDS = 10.0
CONTROL_SECONDS = 30.0  # for what only asks or signals; generations and weights take as long as they take
IDLE_SECONDS = 3.0  # vLLM closes idle connections after 5 s; reusing one at that moment would fail a call
REFUSAL_BYTES = 1 << 20  # of a refusal are read

T = TypeVar("T")


class RouteMissing(EngineError):
    """The server knows no such route (404)."""


class _Error(Struct):
    message: str


class _ErrorBody(Struct):
    error: _Error | str


class Server:
    """The routes of one server. Made inside a running event loop, which owns its connections.

    Args:
        url: its root, perhaps with a path that stands before every route.
        api_key: sent with every request; empty for none.
        key_variable: where the key comes from, for the advice when it is refused.
    """

    def __init__(self, url: str, api_key: str = "", key_variable: str = KEY_VARIABLE) -> None:
        self.url = shown(url.rstrip("/"))
        self.closed = False
        self._key_variable = key_variable
        self._origin = Origin(url.rstrip("/"), api_key, CONNECT_SECONDS, IDLE_SECONDS)

    @asynccontextmanager
    async def opened(self, method: str, path: str, body: Callable[[], bytes]) -> AsyncIterator[Reply]:
        """The answer to a request, closed in the end; see `begun`. What its reader finds malformed is the server's fault."""
        with self.faults(), closing(await self.begun(method, path, body)) as reply:
            yield reply

    async def begun(self, method: str, path: str, body: Callable[[], bytes]) -> Reply:
        """The answer to a request, once it has begun with 200; close it.

        Raises:
            EngineRefusal: the server says that it is asked for what it cannot do (400, 422).
            EngineError: nobody answers, or the answer is another.
        """
        reply = await self._origin.send(method, path, body)
        if reply.status == 200:
            return reply
        with closing(reply):
            raise self._refusal(path, reply.status, refusal_text(await reply.read_up_to(REFUSAL_BYTES)))

    async def get(self, path: str, kind: type[T]) -> T:
        """What a route answers to GET."""
        with self.faults():
            return msgspec.json.decode(await self._asked("GET", path, b"", CONTROL_SECONDS), type=kind)

    async def post(self, path: str, body: bytes = b"", seconds: float | None = None) -> bytes:
        """What a route answers to POST; it may take `seconds`, or as long as it takes."""
        return await self._asked("POST", path, body, seconds)

    async def has(self, path: str) -> bool:
        """Whether a POST route exists: GET of it is then refused otherwise than with 404."""
        async with self._within(CONTROL_SECONDS):
            reply = await self._origin.send("GET", path, bytes)
            with closing(reply):
                await reply.read_up_to(REFUSAL_BYTES)
        return reply.status != 404

    @contextmanager
    def faults(self) -> Iterator[None]:
        """What is decoded in here came from the server.

        Raises:
            EngineError: it is malformed.
        """
        try:
            yield
        except (msgspec.DecodeError, RecursionError, OverflowError) as error:
            raise EngineError(f"the engine at {self.url} sent what its kind would not: {error}") from error

    def close(self) -> None:
        """Drop all connections."""
        self.closed = True
        self._origin.close()

    async def _asked(self, method: str, path: str, body: bytes, seconds: float | None) -> bytes:
        async with self._within(seconds), self.opened(method, path, lambda: body) as reply:
            return await reply.read_all()

    @asynccontextmanager
    async def _within(self, seconds: float | None) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise EngineError(f"the engine at {self.url} did not answer within {seconds:.0f} s") from error

    def _refusal(self, path: str, status: int, said: str) -> EngineError:
        advice = f"; set {self._key_variable} to the key that the engine was started with" if status == 401 else ""
        kinds: dict[int, type[EngineError]] = {400: EngineRefusal, 404: RouteMissing, 422: EngineRefusal}
        return kinds.get(status, EngineError)(f"the engine at {self.url} answered {path} with {status}: {said}{advice}")


def refusal_text(body: bytes) -> str:
    """The message in the body of a refusal."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        return body[:500].decode(errors="replace")
    return error if isinstance(error, str) else error.message
