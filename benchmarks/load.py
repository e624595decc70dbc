"""Sends requests over connections that stay open, and measures. No client library: its cost would be the larger part."""

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from benchmarks.bodies import Json, Template

PATIENCE = 180.0  # seconds after which an answer is an error
LAST_EVENT = 65_536  # bytes at the end of a stream in which its last event stands
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class LoadError(Exception):
    """An answer that is none."""


@dataclass(frozen=True)
class Address:
    """Where requests go: a port on loopback, and what their paths begin with."""

    port: int
    prefix: str = ""


class Connection:
    """One connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=2**20))

    async def exchange(self, request: bytes) -> bytes:
        """Body of the answer; of a chunked one with the chunks' frames.

        Raises:
            LoadError: the status is not a success, or no answer comes.
        """
        try:
            async with asyncio.timeout(PATIENCE):
                self._writer.write(request)
                head = await self._reader.readuntil(b"\r\n\r\n")
                body = await self._body(head)
        except (OSError, EOFError, TimeoutError) as error:
            raise LoadError(f"no answer: {type(error).__name__} {error}") from None
        if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 201")):
            status = head.partition(b"\r\n")[0].decode()
            raise LoadError(f"{status}: {body[:300].decode(errors='replace')}")
        return body

    async def _body(self, head: bytes) -> bytes:
        if length := _LENGTH.search(head):
            return await self._reader.readexactly(int(length[1]))
        parts: list[bytes] = []
        tail = b"\r\n"
        while not tail.endswith(_LAST_CHUNK):
            if not (part := await self._reader.read(2**20)):
                raise LoadError("the answer broke off")
            parts.append(part)
            tail = (tail + part)[-len(_LAST_CHUNK) :]
        return b"".join(parts)

    def close(self) -> None:
        self._writer.close()


async def fetch(port: int, request: bytes) -> bytes:
    """One request over a connection of its own; see `Connection.exchange`."""
    connection = await Connection.open(port)
    try:
        return await connection.exchange(request)
    finally:
        connection.close()


async def ask(port: int, request: bytes) -> Json:
    """One request; the JSON object that comes back."""
    answer: Json = msgspec.json.decode(_unchunked(await fetch(port, request)))
    return answer


def _unchunked(body: bytes) -> bytes:
    """The JSON object in a body that may still have the frames of its chunks."""
    if body.startswith(b"{"):
        return body
    parts: list[bytes] = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(body[:length])
        body = body[length + 2 :]
    return b"".join(parts)


@dataclass
class Load:
    """What came of a load.

    Attributes:
        latencies: seconds of each answered request.
        errors: messages of the others.
    """

    latencies: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return len(self.latencies) + len(self.errors)


class Callers:
    """Connections that send at the same time, each its own share of the templates, one request after the other."""

    def __init__(self, port: int, templates: Sequence[Template], concurrency: int, ended: bytes = b"") -> None:
        self._port = port
        self._shares = [itertools.cycle(templates[place::concurrency]) for place in range(concurrency)]
        self._ended = ended
        self._numbers = itertools.count()

    async def for_seconds(self, seconds: float) -> Load:
        """Send until the time is over, at least one request each."""
        deadline = time.perf_counter() + seconds
        return await self._drive(lambda sent: sent > 0 and time.perf_counter() > deadline)

    async def times(self, count: int) -> Load:
        """Send `count` requests each."""
        return await self._drive(lambda sent: sent == count)

    async def _drive(self, enough: Callable[[int], bool]) -> Load:
        load = Load()
        connections = await opened(self._port, len(self._shares))
        pairs = zip(connections, self._shares, strict=True)
        await asyncio.gather(*(self._work(connection, share, enough, load) for connection, share in pairs))
        return load

    async def _work(
        self, connection: Connection, templates: Iterator[Template], enough: Callable[[int], bool], load: Load
    ) -> None:
        """One caller; it gives up at the first error, after which its connection is of no use."""
        sent = 0
        try:
            while not enough(sent):
                request = next(templates).request(next(self._numbers) % 1_000_000)
                started = time.perf_counter()
                answer = await connection.exchange(request)
                if self._ended not in answer[-LAST_EVENT:]:
                    raise LoadError(f"the stream has no end: {answer[-300:].decode(errors='replace')}")
                load.latencies.append(time.perf_counter() - started)
                sent += 1
        except LoadError as error:
            load.errors.append(str(error))
        finally:
            connection.close()


async def opened(port: int, count: int) -> list[Connection]:
    """That many connections, a few at a time."""
    gate = asyncio.Semaphore(50)

    async def one() -> Connection:
        async with gate:
            return await Connection.open(port)

    return list(await asyncio.gather(*(one() for _ in range(count))))
