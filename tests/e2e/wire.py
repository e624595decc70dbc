"""A wiretap between gateway and engine: bytes go through unchanged, and what they say is the engine's own log.

What Polar recorded is held against this, so that no code of Polar's stands between the proof and the wire.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools
import msgspec
import numpy as np
from msgspec import Struct

from polar.engines.scripted import Logged

GENERATE = "/inference/v1/generate"
CHUNK = 1 << 16


@dataclass
class Exchange:
    """A request and its reply. `ended`: the reply is complete."""

    path: str = ""
    asked: bytearray = field(default_factory=bytearray)
    status: int = 0
    answer: bytearray = field(default_factory=bytearray)
    ended: bool = False


class Tap:
    """What went over the wire, in order of the requests."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []

    def log(self) -> list[Logged]:
        """Prompts received and tokens sampled, of every generation that was streamed and not refused."""
        asked = [(each, msgspec.json.decode(each.asked, type=_Asked)) for each in self._accepted()]
        return [_read(each, request) for each, request in asked if request.stream]

    def answered(self) -> int:
        """How many generations have come to their end."""
        return sum(each.ended for each in self._accepted())

    def _accepted(self) -> list[Exchange]:
        return [each for each in self.exchanges if each.path == GENERATE and each.status == 200]


class _Requests:
    """One side of a connection: `httptools` calls it."""

    def __init__(self, tap: Tap) -> None:
        self.open: list[Exchange] = []
        self._tap = tap
        self._at = Exchange()

    def on_message_begin(self) -> None:
        self._at = Exchange()
        self.open.append(self._at)
        self._tap.exchanges.append(self._at)

    def on_url(self, url: bytes) -> None:
        self._at.path += url.decode()

    def on_body(self, body: bytes) -> None:
        self._at.asked += body


class _Replies:
    """The other side: replies come in the order of their requests."""

    def __init__(self, requests: _Requests) -> None:
        self._requests = requests
        self.parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        self._requests.open[0].status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._requests.open[0].answer += body

    def on_message_complete(self) -> None:
        self._requests.open.pop(0).ended = True


@asynccontextmanager
async def tapped(url: str) -> AsyncIterator[tuple[str, Tap]]:
    """Stand before the server at `url`; yields the URL of the wire, and the tap."""
    tap, target = Tap(), urlsplit(url)
    talks: dict[asyncio.StreamWriter, asyncio.Event] = {}

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        over = talks[writer] = asyncio.Event()
        try:
            upstream = await asyncio.open_connection(target.hostname, target.port)
            requests = _Requests(tap)
            up = _pump(reader, upstream[1], httptools.HttpRequestParser(requests))
            down = _pump(upstream[0], writer, _Replies(requests).parser)
            await asyncio.gather(up, down, return_exceptions=True)
        finally:
            over.set()

    server = await asyncio.start_server(connect, "127.0.0.1", 0, limit=CHUNK)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", tap
    finally:
        server.close()
        for writer, over in talks.items():
            writer.close()
            await over.wait()


Parser = httptools.HttpRequestParser | httptools.HttpResponseParser


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parser: Parser) -> None:
    """Pass on what comes, and only then read it; an end on one side is an end on the other."""
    try:
        while data := await reader.read(CHUNK):
            writer.write(data)
            parser.feed_data(data)
            await writer.drain()
    finally:
        writer.close()


class _Asked(Struct):
    token_ids: tuple[int, ...]
    request_id: str = ""
    stream: bool = False


class _TokenLogprob(Struct):
    token_id: int
    logprob: float


class _Logprobs(Struct):
    content: list[_TokenLogprob]


class _Choice(Struct):
    token_ids: list[int] = []
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []


def _read(exchange: Exchange, asked: _Asked) -> Logged:
    """A generation as the wire shows it; one that was cut off has what arrived."""
    logged = Logged(asked.request_id, asked.token_ids)
    for event in bytes(exchange.answer).split(b"\n\n")[:-1]:  # the last is empty, or was cut off
        data = event.removeprefix(b"data: ")
        for choice in [] if data == b"[DONE]" else msgspec.json.decode(data, type=_Chunk).choices:
            entries = choice.logprobs.content if choice.logprobs else []
            assert [entry.token_id for entry in entries] == choice.token_ids
            logged.ids += choice.token_ids
            logged.logprobs += [float(np.float32(entry.logprob)) for entry in entries]
            logged.finish = choice.finish_reason or ""
    return logged
