"""A small HTTP/1.1 client for the gateway's one hot path: a request to an engine, whose answer may be streamed.

A general client costs more per call, and per token, than most of what the gateway itself does. This one keeps connections to one
origin and hands on the bytes of a body as they arrive; it knows no redirects, cookies or content encodings.
"""

import asyncio
import ssl
from base64 import b64encode
from collections.abc import Callable
from typing import cast
from urllib.parse import unquote, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from polar.engines.keys import shown
from polar.errors import EngineError

HEAD_LIMIT = 1 << 20  # bytes before the body; no server in its senses sends as many
HELD_LIMIT = 1 << 20  # bytes of a body that may wait for their reader before the sender has to wait
ADDRESS_SECONDS = 0.25  # until the next address of a name is tried as well (RFC 8305)


class Events:
    """The events of a `text/event-stream` as they are completed; a piece of a long one is not copied again with the next."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that `data` completes, without OpenAI's closing `[DONE]`. Each event is one line of data."""
        if b"\n" not in data:
            self._rest.append(data)
            return []
        lines = b"".join((*self._rest, data)).split(b"\n")
        self._rest = [lines.pop()]
        return [line[5:] for line in lines if line[:5] == b"data:" and line[5:12].strip() != b"[DONE]"]


class Origin:
    """Keep-alive connections to one server. Made inside a running event loop.

    Args:
        url: `http://host:port` or `https://host:port`, perhaps with a path that stands before every route. Errors name it,
            without user name and password.
        key: sent as bearer token; empty for none.
        connect_seconds: for making a connection. An answer takes as long as it takes.
        idle_seconds: a connection that was idle for as long is closed.
    """

    def __init__(self, url: str, key: str, connect_seconds: float, idle_seconds: float) -> None:
        self.url = shown(url)
        self.open: set[Reply] = set()
        self.idle: dict[Reply, asyncio.TimerHandle] = {}  # with what will close each; the latest stands last
        self._at = urlsplit(url)
        self._key = key
        self._connect_seconds = connect_seconds
        self._idle_seconds = idle_seconds
        self._loop = asyncio.get_running_loop()
        self._tls: ssl.SSLContext | None = None
        self._heads: dict[tuple[str, str], bytes] = {}
        self._closed = False

    async def post(self, path: str, body: Callable[[], bytes]) -> "Reply":
        """Send JSON and wait for the head of the answer; see `send`."""
        return await self.send("POST", path, body)

    async def send(self, method: str, path: str, body: Callable[[], bytes]) -> "Reply":
        """Send a request and wait for the head of the answer; close what is returned.

        An idle connection that is found dead, before anything of an answer came, is replaced by a new one, once. `body` is
        called when it is sent, so that nothing holds it while the server works.

        Raises:
            EngineError: nobody answers, or the connection ends before the head of an answer.
        """
        if self.idle:
            reply, closing = self.idle.popitem()
            closing.cancel()
            if await self._asked(reply, method, path, body):
                return reply
        reply = await self._connect()
        if not await self._asked(reply, method, path, body):
            raise reply.broken("it closed the connection without an answer")
        return reply

    def keep(self, reply: "Reply") -> None:
        """Have a connection for a later call."""
        self.idle[reply] = self._loop.call_later(self._idle_seconds, reply.drop)

    def lost(self, reply: "Reply") -> None:
        """Forget a connection that is gone."""
        self.open.discard(reply)
        if (closing := self.idle.pop(reply, None)) is not None:
            closing.cancel()

    def close(self) -> None:
        """Drop all connections; who still reads from one gets an error."""
        self._closed = True
        for reply in tuple(self.open):
            self.lost(reply)
            reply.drop()

    async def _asked(self, reply: "Reply", method: str, path: str, body: Callable[[], bytes]) -> bool:
        try:
            reply.ask(self._head(method, path), body())
            return await reply.begins()
        except BaseException:
            reply.drop()
            raise

    async def _connect(self) -> "Reply":
        secure = self._at.scheme == "https"
        if secure and self._tls is None:
            self._tls = ssl.create_default_context()
        host, port = self._at.hostname or "", self._at.port or (443 if secure else 80)
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, reply = await self._loop.create_connection(
                    lambda: Reply(self), host, port, ssl=self._tls, happy_eyeballs_delay=ADDRESS_SECONDS
                )
        except (OSError, UnicodeError) as error:  # TimeoutError is the first, and has nothing to say; the second is of a bad name
            why = str(error) or f"no connection within {self._connect_seconds:g} s"
            raise EngineError(f"no engine answers at {self.url}: is it running? ({why})") from error
        if self._closed:
            reply.drop()
            raise EngineError(f"the connections to the engine at {self.url} are closed")
        return reply

    def _head(self, method: str, path: str) -> bytes:
        if (head := self._heads.get((method, path))) is None:
            user, _, host = self._at.netloc.rpartition("@")
            lines = [f"{method} {self._at.path}{path} HTTP/1.1", f"Host: {host}", "User-Agent: polar"]
            if self._key:
                lines.append(f"Authorization: Bearer {self._key}")
            elif user:
                lines.append(f"Authorization: Basic {b64encode(unquote(user).encode()).decode()}")
            lines += ["Content-Type: application/json", "Content-Length: "]
            head = self._heads[method, path] = "\r\n".join(lines).encode()
        return head


class Reply(asyncio.Protocol):
    """An answer on its way, and the connection that brings it, which may bring others later. `status` is 0 before the head."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._loop = asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._fault: EngineError | None = None
        self._start(done=True)

    def _start(self, *, done: bool) -> None:
        self.status = 0
        self._seen = 0  # bytes before the body
        self._framed = False  # the head says where the body ends, otherwise the end of the connection does
        self._keeps = False  # the connection outlives the answer
        self._pieces: list[bytes] = []
        self._held = 0
        self._done = done

    def ask(self, head: bytes, body: bytes) -> None:
        """Send a request; what is read next is the answer to it."""
        self._start(done=False)
        self._transport.writelines((head, b"%d\r\n\r\n" % len(body), body))

    async def begins(self) -> bool:
        """Wait for the head; False if the connection ended before anything came.

        Raises:
            EngineError: it ended in the middle of the head, or this is no HTTP.
        """
        while not self.status:
            if self._fault is not None:
                if self._seen:
                    raise self._fault
                return False
            await self._arrival()
        return True

    async def read(self) -> bytes:
        """What has arrived of the body since the last time; empty at its end.

        Raises:
            EngineError: the connection broke before; all that came until then has been read.
        """
        while not self._pieces:
            if self._done:
                return b""
            if self._fault is not None:
                raise self._fault
            await self._arrival()
        data = b"".join(self._pieces)
        self._pieces.clear()
        if self._held > HELD_LIMIT:
            self._transport.resume_reading()
        self._held = 0
        return data

    async def read_all(self) -> bytes:
        """The rest of the body."""
        pieces = []
        while data := await self.read():
            pieces.append(data)
        return b"".join(pieces)

    async def read_up_to(self, size: int) -> bytes:
        """The body, or as much of it as reaches `size`."""
        whole = b""
        while len(whole) < size and (data := await self.read()):
            whole += data
        return whole

    def close(self) -> None:
        """Keep the connection if the answer was read to its end, drop it otherwise."""
        over = self._done and not self._pieces and not self._transport.get_write_buffer_size()
        if over and self._keeps and not self._transport.is_closing():
            self._origin.keep(self)
        else:
            self.drop()

    def drop(self, why: str = "the connection was closed on this side") -> None:
        """End the connection at once."""
        self._fail(why)
        self._transport.abort()

    def broken(self, why: str) -> EngineError:
        """The error of an answer that does not come to its end."""
        return EngineError(f"the engine at {self._origin.url} broke off: {why}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # asyncio has set TCP_NODELAY on it
        self._origin.open.add(self)

    def data_received(self, data: bytes) -> None:
        if self._done:
            self.drop()  # nobody asked for anything
            return
        if not self.status:
            self._seen += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.drop(f"{type(error).__name__}: {error}")
        if not self.status and self._seen > HEAD_LIMIT:
            self.drop(f"a head of more than {HEAD_LIMIT} bytes")
        if self._held > HELD_LIMIT:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._origin.lost(self)
        if exc is None and self.status and not self._framed and self._fault is None:
            self._done = True
        self._fail(f"{type(exc).__name__}: {exc}" if exc else "the connection was closed in the middle of an answer")
        self._wake()

    def on_message_begin(self) -> None:
        """From the parser, as all below. After the end: an answer too many, which is nobody's."""
        self._keeps = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._framed |= name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked"))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and not self._done:  # one below is only a word before the answer
            self.status = status
            self._keeps = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if not self._done:
            self._pieces.append(body)
            self._held += len(body)

    def on_message_complete(self) -> None:
        self._done = self.status > 0

    def _fail(self, why: str) -> None:
        if not self._done and self._fault is None:
            self._fault = self.broken(why)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _arrival(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
