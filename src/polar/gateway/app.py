"""The gateway as an ASGI application: keys, routes, and the connection's side of a call.

A session is found by the key in the path (`/s/{key}/…`) or, failing that, in the headers that API clients send.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import xxhash

from polar.chat import ChatRequest, Delta, ReasoningDelta, TextDelta
from polar.dialects.protocol import EVENT_STREAM, JSON, Dialect, EventWriter
from polar.errors import EngineError, InvalidRequest, PolarError, RequestError, StoreError, UnknownRoute
from polar.gateway.calls import Arrival, Backend, CallRun, reply_of
from polar.gateway.sessions import LiveSession, Sessions
from polar.tokens.records import Call

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HEADERS_AFTER = 10.0  # seconds without a token after which a stream's headers go out (D7)
KEEP_ALIVE_EVERY = 10.0  # seconds of silence after which a stream says that it lives
MAX_BODY = 256 * 1024 * 1024  # bytes of one request
KEPT_HEADERS = ("user-agent", "x-stainless-retry-count")


class Connection:
    """One HTTP exchange. `gone` is set when the client has hung up."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self.gone = False
        self._receive = receive
        self._send = send

    async def body(self) -> bytes:
        """The whole request body.

        Raises:
            InvalidRequest: larger than `MAX_BODY`, or the client hung up in its middle.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise InvalidRequest("the client hung up before its request was complete")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > MAX_BODY:
                raise InvalidRequest(f"the request body is larger than {MAX_BODY} bytes")
            if not message.get("more_body", False):
                return b"".join(parts)

    async def hung_up(self) -> None:
        """Wait until the client hangs up."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True

    async def start(self, status: int, content_type: str) -> None:
        headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def respond(self, status: int, body: bytes, content_type: str = JSON) -> None:
        await self.start(status, content_type)
        await self.send(body, more=False)


class GatewayApp:
    """Model calls of all sessions. Control routes, if any, are another application's."""

    def __init__(self, sessions: Sessions, backend: Backend, dialects: tuple[Dialect, ...]) -> None:
        self._sessions = sessions
        self._backend = backend
        self._dialects = dialects
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        connection = Connection(scope, receive, send)
        key, path = split_key(connection.path, connection.headers)
        dialect = next((dialect for dialect in self._dialects if dialect.serves(path)), None)
        try:
            await self._answer(connection, dialect, key, path)
        except PolarError as error:
            if not connection.gone:
                await connection.respond(*shape(dialect or self._dialects[0], error))

    async def drain(self) -> None:
        """Wait until notes about deliveries are stored."""
        await asyncio.gather(*self._tasks)

    async def _answer(self, connection: Connection, dialect: Dialect | None, key: str, path: str) -> None:
        if connection.method in ("GET", "HEAD") and path in ("/", "/health"):
            await connection.respond(200, b"{}")
            return
        session = self._sessions.by_key(key)
        if dialect is None or connection.method != "POST":
            raise UnknownRoute(f"{connection.method} {path} is not served here")
        if self._sessions.closing:
            raise EngineError("the gateway is shutting down")
        received = time.time()
        body = await connection.body()
        request = _parse(dialect, path, body, session)
        headers = {name: connection.headers[name] for name in KEPT_HEADERS if name in connection.headers}
        request_hash = xxhash.xxh3_128_hexdigest(dialect.name.encode() + body)
        arrival = Arrival(request, dialect.name, request_hash, headers, received)
        if (unsent := session.unsent(request_hash)) is not None:
            await unsent.done()
        if (call := session.undelivered(request_hash)) is not None and not session.frozen:
            await self._replay(connection, dialect, session, arrival, call)
        elif request.stream:
            await self._stream(connection, dialect, arrival, self._run(session, arrival))
        else:
            await self._whole(connection, dialect, self._run(session, arrival))

    def _run(self, session: LiveSession, arrival: Arrival) -> CallRun:
        """The run that answers this request: one in progress whose client has gone, or a new one."""
        run = session.abandoned(arrival.request_hash)
        if run is not None and not arrival.request.stream:
            run.join()
            return run
        run = CallRun(session, self._backend, arrival, session.admit(), session.superseded(arrival.request_hash))
        run.start()
        return run

    async def _whole(self, connection: Connection, dialect: Dialect, run: CallRun) -> None:
        """Answer when the call is committed. If the client goes first, the run goes on for a retry."""
        waiting, watcher = asyncio.ensure_future(run.done()), asyncio.ensure_future(connection.hung_up())
        try:
            await asyncio.wait({waiting, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not run.feed.ended:
                run.leave(run.session.stored.profile.retry_grace)
                return
            if run.error is not None or run.call is None:
                raise run.error or EngineError("the call ended without an outcome")
            await connection.respond(200, dialect.reply(reply_of(run.call)))
            self._delivered(connection, run.session, run.call)
        finally:
            waiting.cancel()
            watcher.cancel()

    async def _stream(self, connection: Connection, dialect: Dialect, arrival: Arrival, run: CallRun) -> None:
        """Send deltas as they come, and what can be acted on once it is committed."""
        writer = dialect.events(arrival.request, run.call_id, int(arrival.received))
        watcher = asyncio.create_task(_watch(connection, run))
        try:
            deltas = await run.feed.take(HEADERS_AFTER)
            if run.feed.ended and run.error is not None:
                raise run.error
            if not connection.gone:
                await connection.start(200, EVENT_STREAM)
                await connection.send(writer.start(), more=True)
                await self._send_deltas(connection, writer, run, deltas)
                await self._send_end(connection, writer, run)
        finally:
            watcher.cancel()
            if connection.gone:
                run.stop()

    async def _send_deltas(self, connection: Connection, writer: EventWriter, run: CallRun, deltas: list[Delta]) -> None:
        while not connection.gone:
            if deltas:
                await connection.send(b"".join(map(writer.delta, joined(deltas))), more=True)
            elif not run.feed.ended:
                await connection.send(writer.keep_alive(), more=True)
            if run.feed.drained:
                return
            deltas = await run.feed.take(KEEP_ALIVE_EVERY)

    async def _send_end(self, connection: Connection, writer: EventWriter, run: CallRun) -> None:
        if connection.gone:
            return
        if run.error is not None or run.call is None:
            error = describe(run.error or EngineError("the call ended without an outcome"))
            await connection.send(writer.error(*error), more=False)
        else:
            await connection.send(writer.finish(reply_of(run.call)), more=False)
            self._delivered(connection, run.session, run.call)

    async def _replay(self, connection: Connection, dialect: Dialect, session: LiveSession, arrival: Arrival, call: Call) -> None:
        """Send a committed answer again, whose first delivery failed (D9)."""
        reply = reply_of(call)
        if not arrival.request.stream:
            await connection.respond(200, dialect.reply(reply))
        else:
            writer = dialect.events(arrival.request, call.call_id, reply.created)
            said: list[Delta] = [ReasoningDelta(reply.message.reasoning)] if reply.message.reasoning else []
            said += [TextDelta(reply.message.text)] if reply.message.text else []
            await connection.start(200, EVENT_STREAM)
            await connection.send(writer.start() + b"".join(map(writer.delta, said)) + writer.finish(reply), more=False)
        self._delivered(connection, session, call)

    def _delivered(self, connection: Connection, session: LiveSession, call: Call) -> None:
        """Note that the last byte went out. A lost note only means that a retry would be replayed."""
        if connection.gone:
            return
        session.deliver(call)
        task = asyncio.create_task(self._note_delivery(session.session_id, call.call_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _note_delivery(self, session_id: str, call_id: str) -> None:
        try:
            await self._backend.store.mark_delivered(session_id, call_id)
        except StoreError as error:
            log.warning("delivery of call %s is not noted: %s", call_id, error)


def _parse(dialect: Dialect, path: str, body: bytes, session: LiveSession) -> ChatRequest:
    """The request; the session remembers a refusal, which no call records."""
    try:
        return dialect.parse(path, body)
    except InvalidRequest as error:
        session.refused, session.refused_last = str(error), True
        raise


async def _watch(connection: Connection, run: CallRun) -> None:
    """Stop the run as soon as its streaming client hangs up (C03)."""
    await connection.hung_up()
    run.feed.hang_up()
    run.stop()


def split_key(path: str, headers: dict[str, str]) -> tuple[str, str]:
    """Model key and the rest of the path; the key "" where none was sent."""
    if path.startswith("/s/"):
        key, slash, rest = path[3:].partition("/")
        return key, slash + rest
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip(), path
    return headers.get("x-api-key", headers.get("x-goog-api-key", "")), path


def joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind as one: what arrived together is sent together."""
    result: list[Delta] = []
    for delta in deltas:
        if result and isinstance(delta, type(result[-1])):
            result[-1] = type(delta)(result[-1].text + delta.text)
        else:
            result.append(delta)
    return result


def describe(error: PolarError) -> tuple[int, str, str]:
    """Status, code and message of an error. Faults of ours are 5xx, which every harness retries."""
    if isinstance(error, RequestError):
        return error.status, error.code, str(error)
    if isinstance(error, EngineError):
        return 503, "engine_error", str(error)
    if isinstance(error, StoreError):
        return 503, "store_error", str(error)
    return 500, "capture_error", str(error)


def shape(dialect: Dialect, error: PolarError) -> tuple[int, bytes]:
    """Status and body of an error reply."""
    status, code, message = describe(error)
    return status, dialect.error(status, code, message)
