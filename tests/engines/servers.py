"""What the tests of vLLM's client talk to: the scripted engine, and a server that says certain bytes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import numpy as np

from polar.engines.protocol import Generated
from polar.engines.scripted import Logged, ScriptedEngine, scripted_server
from polar.engines.vllm import VllmEngine
from polar.specs import Int32Array

MISSING = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


@asynccontextmanager
async def client_of(url: str, key: str = "") -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(url, key)
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def serving(scripted: ScriptedEngine) -> AsyncIterator[VllmEngine]:
    async with scripted_server(scripted) as url, client_of(url) as engine:
        yield engine


@asynccontextmanager
async def replaying(*pieces: bytes, pause: float = 0.0, key: str = "") -> AsyncIterator[tuple[VllmEngine, list[bytes]]]:
    """An engine that answers any request with these bytes; see `saying`."""
    async with saying(*pieces, pause=pause) as (url, requests), client_of(url, key) as engine:
        yield engine, requests


@asynccontextmanager
async def saying(*pieces: bytes, pause: float = 0.0) -> AsyncIterator[tuple[str, list[bytes]]]:
    """URL of a server that answers any request with these bytes, with pauses between them; also the requests that it got.

    It names no weight versions.
    """
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) if b"ontent-" in head else 0
        if head.startswith(b"GET /weight_info"):
            writer.write(MISSING)
            writer.close()
            return
        requests.append(head + await reader.readexactly(length))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), pause)
        writer.close()

    over = asyncio.Event()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests
        over.set()


def stream(*events: bytes) -> bytes:
    content = b"".join(events)
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(content) + content


def ids(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def joined(parts: list[Generated]) -> tuple[list[int], list[float]]:
    return [token for part in parts for token in part.ids], [value for part in parts for value in part.logprobs]


async def logged(scripted: ScriptedEngine, tokens: int) -> Logged:
    """The first generation, once it has sampled so many tokens."""
    async with asyncio.timeout(2):
        while not scripted.log or len(scripted.log[0].ids) < tokens:
            await asyncio.sleep(0.005)
    return scripted.log[0]


async def freed(scripted: ScriptedEngine) -> Logged:
    """The first generation, once it is over."""
    async with asyncio.timeout(2):
        while not scripted.log or scripted.log[0].freed_at is None:
            await asyncio.sleep(0.005)
    return scripted.log[0]
