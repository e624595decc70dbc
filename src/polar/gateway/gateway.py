"""A gateway that listens: one server, one store, one policy, in the caller's event loop."""

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from polar.dialects import DIALECTS
from polar.engines.protocol import EngineInfo
from polar.engines.served import Served
from polar.errors import UsageError
from polar.gateway.app import GatewayApp, Receive, Scope, Send
from polar.gateway.backend import Backend
from polar.gateway.control import ControlApp
from polar.gateway.sessions import Sessions
from polar.store.capture import CaptureReader, CaptureStore

CORKED_BYTES = 65536
YOUNG_OBJECTS = 20_000  # that are made before a collection; Python's own limit is 700
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Gateway:
    """What a running gateway offers to its own process.

    Attributes:
        url: `http://host:port`; a session's base URL is `{url}/s/{key}`.
        restored: sessions of an earlier process that are still open.
    """

    url: str
    sessions: Sessions
    info: EngineInfo
    restored: int

    def base_url(self, key: str) -> str:
        return f"{self.url}/s/{key}"


@contextlib.asynccontextmanager
async def gateway(
    policy: Served,
    capture: Path,
    *,
    routes: Mapping[str, Served] = MappingProxyType({}),
    host: str = "127.0.0.1",
    port: int = 0,
    control_key: str = "",
) -> AsyncIterator[Gateway]:
    """Serve model calls until the block ends; then abort what is being generated, record it, and close the store.

    Args:
        policy: what answers the calls, unless a route says otherwise.
        capture: the capture file; sessions of an earlier process that it holds go on.
        routes: other models, by the names that harnesses ask for; their calls are recorded and never trained.
        port: 0 picks a free one.
        control_key: opens the control routes (`/sessions …`) to who sends it; "" leaves them out.

    Raises:
        UsageError: the address is taken, or is not loopback while there is no control key; or an engine cannot be asked as
            it is to be.
        StoreError: the capture file cannot be opened.
    """
    if host not in LOOPBACK and not control_key:
        raise UsageError(f"refusing to listen on {host} without a control key; set one, or listen on 127.0.0.1")
    _check(policy, routes)
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(_listen(host, port)))
        store = CaptureStore.open(capture)
        stack.push_async_callback(store.close)
        sessions = Sessions(store, policy.renderer, policy.info.model)
        with contextlib.closing(CaptureReader.open(capture)) as reader:
            restored = sessions.restore(reader)
        app = GatewayApp(sessions, Backend(policy, store, capture, routes), DIALECTS)
        address = f"[{host}]" if ":" in host else host
        running = Gateway(f"http://{address}:{listener.getsockname()[1]}", sessions, policy.info, restored)
        control = ControlApp(running, capture, control_key) if control_key else None
        await stack.enter_async_context(_serving(_Router(app, control), listener))
        stack.push_async_callback(_stop_runs, sessions)
        stack.enter_context(_fewer_collections())
        yield running


@contextlib.contextmanager
def _fewer_collections() -> Iterator[None]:
    """Histories are many long-lived objects in no cycles, among which Python would search for cycles at every few calls."""
    thresholds = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _check(policy: Served, routes: Mapping[str, Served]) -> None:
    if not policy.trains:
        raise UsageError("the policy is the model that is trained; a model that is not can only have a route")
    for name, served in routes.items():
        if served.trains:
            raise UsageError(f"route {name!r}: there is one policy; what a route names is another model (`trains=False`)")
    for name, served in {"the policy": policy, **routes}.items():
        if served.renderer is None and not served.info.chats:
            raise UsageError(f"{name}: there is no renderer for {served.info.model}, and its engine does not render itself")
        if served.renderer is not None and not served.info.token_in:
            raise UsageError(f"{name}: the engine of {served.info.model} takes no ids; leave the renderer out")


@contextlib.asynccontextmanager
async def _serving(app: "_Router", listener: socket.socket) -> AsyncIterator[None]:
    """An HTTP server in this loop."""
    server = _Server(_config(app))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if serving.done():
                await serving
            await asyncio.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        await serving


def _config(app: "_Router") -> uvicorn.Config:
    """No access log: it would hold the keys that stand in paths (D20)."""
    return uvicorn.Config(
        app,
        http=_Protocol,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
    )


class _Protocol(HttpToolsProtocol):
    """HTTP as uvicorn speaks it, but what is written in one turn of the event loop goes out in one piece: a system call
    that wakes another process costs more than all else about a small reply."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(_Corked(transport))  # type: ignore[arg-type]


class _Corked:
    """A transport that gathers writes until the event loop's next turn."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        if not self._parts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size > CORKED_BYTES:
            self._flush()  # so that the transport can say that its client does not read

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._parts:
            self._transport.write(b"".join(self._parts))
            self._parts.clear()
            self._size = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)


class _Server(uvicorn.Server):
    """Signals belong to the program around it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True)
class _Router:
    calls: GatewayApp
    control: ControlApp | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.control is not None and scope["path"].split("/")[1:2] == ["sessions"]:
            await self.control(scope, receive, send)
        else:
            await self.calls(scope, receive, send)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, so that asyncio turns Nagle's algorithm off: with it each reply waits 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port, 0 picks a free one") from None
    return listener


async def _stop_runs(sessions: Sessions) -> None:
    """Take no more calls; abort what is being generated, and wait until it is recorded."""
    sessions.closing = True
    runs = [run for session in sessions for run in session.runs]
    for run in runs:
        run.stop()
    for run in runs:
        await run.done()
