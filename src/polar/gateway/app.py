"""The gateway as an ASGI application: keys, routes, and the connection's side of a call.

A session is found by the key in the path (`/s/{key}/…`) or, failing that, in the headers that API clients send.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from msgspec.structs import replace

from polar.chat import ChatRequest, Delta, ReasoningDelta, Reply, TextDelta
from polar.dialects.bodies import Memory
from polar.dialects.protocol import JSON, Dialect, EventWriter, Fault, FaultKind, ModelCard, Route, Target
from polar.errors import (
    ContextLengthExceeded,
    EngineError,
    InvalidRequest,
    PolarError,
    RequestError,
    SessionFrozen,
    StoreError,
    UnknownKey,
    UnknownRoute,
)
from polar.gateway.backend import Backend
from polar.gateway.calls import CallRun
from polar.gateway.counting import count
from polar.gateway.drafts import Arrival
from polar.gateway.previous import follow
from polar.gateway.replies import reply_of
from polar.gateway.retries import request_hash
from polar.gateway.sessions import LiveSession, Sessions
from polar.gateway.terms import Addresses, unseen
from polar.tokens.normalisers import normalise
from polar.tokens.records import Call

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HEADERS_AFTER = 10.0  # seconds without a token after which a stream's headers go out (D7)
KEEP_ALIVE_EVERY = 10.0  # seconds of silence after which a stream says that it lives
LONGEST_ROUTE = 200  # characters of an unknown route that are noted
STARTED = int(time.time())  # what the models routes give as the time of creation
MOST_STOPS, LONGEST_STOP = 16, 1024  # stop texts of a call, characters of one
MAX_BODY = 256 * 1024 * 1024  # bytes of one request
KEPT_HEADERS = (
    *("user-agent", "x-stainless-retry-count", "anthropic-version", "anthropic-beta", "openai-beta", "x-goog-api-client"),
    # How harnesses name their conversations, and which agent of theirs asks.
    *("session-id", "thread-id", "x-client-request-id", "x-codex-turn-metadata", "x-codex-window-id"),
    *("x-codex-parent-thread-id", "x-openai-subagent", "x-claude-code-session-id", "x-claude-code-agent-id"),
    *("x-session-id", "x-session-affinity", "x-parent-session-id", "x-affinity", "x-initiator", "x-interaction-type"),
)


class Connection:
    """One HTTP exchange. `gone` is set when the client has hung up."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope.get("query_string", b"").decode("latin-1")
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
        self._memory = Memory()
        self._addresses = Addresses()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        connection = Connection(scope, receive, send)
        key, path = split_key(connection.path, connection.query, connection.headers)
        target = Target(connection.method, path, connection.query, connection.headers)
        dialect, route = self._find(target)
        try:
            await self._answer(connection, dialect, route, target, key)
        except PolarError as error:
            if not connection.gone:
                await connection.respond(*dialect.fault(describe(error)))

    def _find(self, target: Target) -> tuple[Dialect, Route | None]:
        """Who serves this; where nobody does, who answers in its shape."""
        for dialect in self._dialects:
            if route := dialect.route(target):
                return dialect, route
        return next(dialect for dialect in self._dialects if dialect.claims(target)), None

    async def _answer(self, connection: Connection, dialect: Dialect, route: Route | None, target: Target, key: str) -> None:
        if target.method in ("GET", "HEAD") and target.path in ("", "/", "/health"):
            await connection.respond(200, b"{}")
            return
        session = self._sessions.by_key(key)
        if route is None:
            asked = f"{target.method} {target.path.replace(key, '(model key)')}"[:LONGEST_ROUTE]  # keys stay out of texts (D20)
            session.note_unknown(asked)
            raise UnknownRoute(f"{asked} is not served here")
        if route.kind == "models":
            await connection.respond(200, dialect.models(route, self._cards(route.model)))
            return
        if self._sessions.closing:
            raise EngineError("the gateway is shutting down")
        if route.kind == "count_tokens":
            await self._count(connection, dialect, session, target)
        else:
            await self._generate(connection, dialect, session, target)

    def _cards(self, model: str) -> list[ModelCard]:
        """Who answers to a name (any but a route's is the policy's); for "" all that there are, the policy first."""
        names = [model] if model else [self._backend.policy.info.model, *self._backend.routes]
        return [ModelCard(name, self._backend.served(name).info.max_model_len, STARTED) for name in names]

    async def _count(self, connection: Connection, dialect: Dialect, session: LiveSession, target: Target) -> None:
        """Tokens that this request would send to the engine; nothing is recorded."""
        request = await self._read(dialect, target, await connection.body(), session)
        tokens = await count(request, session.history, self._backend.served(request.model))
        await connection.respond(200, dialect.token_count(tokens))

    async def _generate(self, connection: Connection, dialect: Dialect, session: LiveSession, target: Target) -> None:
        received = time.time()
        body = await connection.body()
        session.check_open()
        try:
            request = await self._read(dialect, target, body, session)
        except InvalidRequest as error:  # no call records it, so the session does
            session.refused, session.refused_last = str(error), True
            raise
        headers = {name: connection.headers[name] for name in KEPT_HEADERS if name in connection.headers}
        digests = self._addresses.of(request)
        asked = request_hash(dialect.name, target, request, digests)
        news = unseen(request, digests, session.stored_bodies)
        arrival = Arrival(request, digests, news, dialect.name, asked, headers, received)
        del body, request  # a call may take minutes
        if (unsent := session.unsent(asked)) is not None:
            await unsent.done()
        if (call := session.undelivered(asked)) is not None and not session.frozen:
            await self._replay(connection, dialect, session, arrival, call)
        elif arrival.request.stream:
            await self._stream(connection, dialect, arrival, self._run(session, arrival))
        else:
            await self._whole(connection, dialect, arrival, self._run(session, arrival))

    async def _read(self, dialect: Dialect, target: Target, body: bytes, session: LiveSession) -> ChatRequest:
        """The request, normalised."""
        request = await follow(dialect.parse(target, body, self._memory), dialect.name, session, self._backend.capture)
        return bounded(normalise(request, session.stored.profile.normalisers))

    def _run(self, session: LiveSession, arrival: Arrival) -> CallRun:
        """The run that answers this request: one in progress whose client has gone, or a new one."""
        run = session.abandoned(arrival.request_hash)
        if run is not None and not arrival.request.stream:
            run.join()
            arrival.forget()
            return run
        run = CallRun(session, self._backend, arrival, session.admit(), session.superseded(arrival.request_hash))
        run.start()
        return run

    async def _whole(self, connection: Connection, dialect: Dialect, arrival: Arrival, run: CallRun) -> None:
        """Answer when the call is committed. If the client goes first, the run goes on for a retry."""
        run.session.delivering.add(run.call_id)
        watcher = asyncio.create_task(connection.hung_up())
        try:
            await asyncio.wait({run.task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not run.feed.ended:
                run.leave(run.session.stored.profile.retry_grace)
                return
            if run.error is not None or run.call is None:
                raise run.error or EngineError("the call ended without an outcome")
            await connection.respond(200, dialect.reply(arrival.request, _reply(run.session, run.call, arrival)))
            self._delivered(connection, run.session, run.call)
        finally:
            watcher.cancel()
            run.session.left(run.call_id)

    async def _stream(self, connection: Connection, dialect: Dialect, arrival: Arrival, run: CallRun) -> None:
        """Send deltas as they come, and what can be acted on once it is committed."""
        writer = dialect.events(arrival.form, run.call_id, int(arrival.received))
        run.session.delivering.add(run.call_id)
        watcher = asyncio.create_task(_watch(connection, run))
        try:
            deltas = await run.feed.take(HEADERS_AFTER)
            if run.feed.ended and run.error is not None:
                raise run.error
            if not connection.gone:
                await connection.start(200, writer.content_type)
                await connection.send(writer.start(), more=True)
                await self._send_deltas(connection, writer, run, deltas)
                await self._send_end(connection, writer, arrival, run)
        finally:
            watcher.cancel()
            if connection.gone:
                run.stop()
            run.session.left(run.call_id)

    async def _send_deltas(self, connection: Connection, writer: EventWriter, run: CallRun, deltas: list[Delta]) -> None:
        while not connection.gone:
            if deltas:
                await connection.send(b"".join(map(writer.delta, joined(deltas))), more=True)
            elif not run.feed.ended:
                await connection.send(writer.keep_alive(), more=True)
            if run.feed.drained:
                return
            deltas = await run.feed.take(KEEP_ALIVE_EVERY)

    async def _send_end(self, connection: Connection, writer: EventWriter, arrival: Arrival, run: CallRun) -> None:
        if connection.gone:
            return
        if run.error is not None or run.call is None:
            fault = describe(run.error or EngineError("the call ended without an outcome"))
            await connection.send(writer.error(fault), more=False)
        else:
            await connection.send(writer.finish(_reply(run.session, run.call, arrival)), more=False)
            self._delivered(connection, run.session, run.call)

    async def _replay(self, connection: Connection, dialect: Dialect, session: LiveSession, arrival: Arrival, call: Call) -> None:
        """Send a committed answer again, whose first delivery failed (D9)."""
        reply = _reply(session, call, arrival)
        session.delivering.add(call.call_id)
        try:
            if arrival.request.stream:
                writer = dialect.events(arrival.request, call.call_id, reply.created)
                await connection.start(200, writer.content_type)
                await connection.send(_again(writer, reply), more=False)
            else:
                await connection.respond(200, dialect.reply(arrival.request, reply))
            self._delivered(connection, session, call)
        finally:
            session.left(call.call_id)

    def _delivered(self, connection: Connection, session: LiveSession, call: Call) -> None:
        """Note that the last byte went out, unless the session's result has been counted without it."""
        if connection.gone or session.counted:
            return
        session.deliver(call)
        self._backend.store.note_delivered(session.session_id, call.call_id)


def _again(writer: EventWriter, reply: Reply) -> bytes:
    """All events of a reply that is known whole."""
    said: list[Delta] = []
    for index, choice in enumerate(reply.choices):
        said += [ReasoningDelta(choice.message.reasoning, index)] if choice.message.reasoning else []
        said += [TextDelta(choice.message.text, index)] if choice.message.text else []
    return writer.start() + b"".join(map(writer.delta, said)) + writer.finish(reply)


def _reply(session: LiveSession, call: Call, arrival: Arrival) -> Reply:
    return reply_of(call, session.history, logprobs=arrival.request.logprobs)


async def _watch(connection: Connection, run: CallRun) -> None:
    """Stop the run as soon as its streaming client hangs up (C03)."""
    await connection.hung_up()
    run.feed.hang_up()
    run.stop()


def bounded(request: ChatRequest) -> ChatRequest:
    """The request with no more stop texts than can be watched for at every token; the rest is unserved."""
    stop = request.sampling.stop
    kept = tuple(text for text in stop if len(text) <= LONGEST_STOP)[:MOST_STOPS]
    if kept == stop:
        return request
    sampling = replace(request.sampling, stop=kept)
    return replace(request, sampling=sampling, unserved=(*request.unserved, "stop"))


def split_key(path: str, query: str, headers: dict[str, str]) -> tuple[str, str]:
    """Model key and the rest of the path; the key "" where none was sent. Where several were, the path's counts."""
    if path.startswith("/s/"):
        key, slash, rest = path[3:].partition("/")
        return key, slash + rest
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip(), path
    for name in ("x-api-key", "x-goog-api-key", "api-key"):
        if name in headers:
            return headers[name], path
    return "".join(parse_qs(query).get("key", [])[:1]), path


def joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind as one: what arrived together is sent together."""
    result: list[Delta] = []
    for delta in deltas:
        if result and isinstance(delta, type(result[-1])) and delta.choice == result[-1].choice:
            result[-1] = type(delta)(result[-1].text + delta.text, delta.choice)
        else:
            result.append(delta)
    return result


_KINDS: tuple[tuple[type[PolarError], FaultKind, str], ...] = (
    (UnknownKey, "unauthorized", UnknownKey.code),
    (UnknownRoute, "not_found", UnknownRoute.code),
    (SessionFrozen, "frozen", SessionFrozen.code),
    (RequestError, "invalid", RequestError.code),
    (EngineError, "unavailable", "engine_error"),
    (StoreError, "unavailable", "store_error"),
)


def describe(error: PolarError) -> Fault:
    """An error as the dialects tell it. Faults of ours are 5xx, which every harness retries."""
    if isinstance(error, ContextLengthExceeded):
        return Fault("context_length", error.code, str(error), error.prompt_tokens, error.max_model_len)
    for kind_of_error, kind, code in _KINDS:
        if isinstance(error, kind_of_error):
            return Fault(kind, code, str(error))
    return Fault("internal", "capture_error", str(error))
