"""The client of the streamed route, against a server that is only a socket: it sends what a test says, when it says so."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trustme

from polar.engines import streaming
from polar.engines.streaming import Origin, Reply
from polar.errors import EngineError

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
BODY = b"data: one\n\ndata: two\n\n"
SECOND_CHUNK = b"5\r\nthree\r\n"
LAST_CHUNK = b"0\r\n\r\n"
PAUSE = 0.005  # seconds in which what was sent has arrived alone
IDLE = 30.0


def sized(body: bytes, *lines: bytes) -> bytes:
    return HEAD + b"".join(line + b"\r\n" for line in lines) + b"content-length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return CHUNKED + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + LAST_CHUNK


@dataclass
class Wire:
    """One connection, as the server has it. `number` counts connections, `turn` the requests of this one, both from 0."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int
    turn: int = 0

    async def request(self) -> bytes:
        """The next request; IncompleteReadError at the end of the connection."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        return head + await self.reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(PAUSE if len(pieces) > 1 else 0)


Answer = Callable[[Wire], Awaitable[None]]


@dataclass
class Server:
    """What came to the server, and the client that asks it."""

    origin: Origin
    wires: list[Wire] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)
    ended: int = 0  # connections

    async def until_ended(self, count: int) -> None:
        async with asyncio.timeout(2):
            while self.ended < count:
                await asyncio.sleep(0.002)


@asynccontextmanager
async def serving(
    answer: Answer, *, key: str = "", idle: float = IDLE, path: str = "", login: str = "", tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """A server that has `answer` called after each request, until it closes the connection."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, len(server.wires))
        server.wires.append(wire)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                server.requests.append(await wire.request())
                await answer(wire)
                wire.turn += 1
        writer.close()
        server.ended += 1

    listener = await asyncio.start_server(connection, "localhost" if tls else "127.0.0.1", 0, ssl=tls)
    host, port = "localhost" if tls else "127.0.0.1", listener.sockets[0].getsockname()[1]
    server = Server(Origin(f"{'https' if tls else 'http'}://{login}{host}:{port}{path}", key, 2.0, idle))
    async with listener:
        yield server
        server.origin.close()
        await server.until_ended(len(server.wires))


def sending(*pieces: bytes) -> Answer:
    """Always the same answer."""

    async def answer(wire: Wire) -> None:
        await wire.send(*pieces)

    return answer


def ending(*pieces: bytes) -> Answer:
    """The same, after which the server closes."""

    async def answer(wire: Wire) -> None:
        await wire.send(*pieces)
        wire.writer.close()

    return answer


def body() -> bytes:
    return b"{}"


async def ask(origin: Origin) -> Reply:
    return await origin.post("/route", body)


async def pieces_of(reply: Reply) -> list[bytes]:
    """The body, as it arrives."""
    pieces = []
    with closing(reply):
        while data := await reply.read():
            pieces.append(data)
    return pieces


async def whole(origin: Origin) -> bytes:
    return b"".join(await pieces_of(await ask(origin)))


class TestRequest:
    async def test_it_says_what_a_server_needs_and_no_more(self) -> None:
        async with serving(sending(sized(b"")), key="the-key", path="/engine") as server:
            (await server.origin.post("/route", lambda: b'{"a":1}')).close()
            host = server.origin.url.removeprefix("http://").removesuffix("/engine").encode()
        assert server.requests == [
            b"POST /engine/route HTTP/1.1\r\nHost: " + host + b"\r\nUser-Agent: polar\r\nAuthorization: Bearer the-key\r\n"
            b'Content-Type: application/json\r\nContent-Length: 7\r\n\r\n{"a":1}'
        ]

    async def test_no_authorization_without_a_key(self) -> None:
        async with serving(sending(sized(b""))) as server:
            (await ask(server.origin)).close()
        assert b"authorization" not in server.requests[0].lower()

    async def test_name_and_password_of_the_url_are_sent_and_stay_out_of_the_host(self) -> None:
        async with serving(sending(sized(b"")), login="me:p%40ss@") as server:
            (await ask(server.origin)).close()
        assert b"\r\nAuthorization: Basic bWU6cEBzcw==\r\n" in server.requests[0]
        assert b"\r\nHost: 127.0.0.1:" in server.requests[0]

    async def test_a_large_body_arrives_whole(self) -> None:
        async with serving(sending(sized(b"ok"))) as server:
            large = bytes(range(256)) * 40_000
            (await server.origin.post("/route", lambda: large)).close()
        assert server.requests[0].endswith(b"\r\n\r\n" + large)

    async def test_small_pieces_are_not_held_back(self) -> None:
        async with serving(sending(sized(b""))) as server:
            (await ask(server.origin)).close()
            (reply,) = server.origin.open
            assert reply._transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0

    async def test_a_body_that_cannot_be_made_leaves_no_connection(self) -> None:
        async with serving(sending(sized(b""))) as server:
            with pytest.raises(ZeroDivisionError):
                await server.origin.post("/route", lambda: b"%d" % (1 // 0))
            await asyncio.sleep(PAUSE)
            assert not server.origin.open


class TestBody:
    @pytest.mark.parametrize("size", [1, 3, len(BODY)])
    async def test_chunks_read_the_same_wherever_tcp_cuts_them(self, size: int) -> None:
        answer = chunked(BODY, size)
        for cut in range(1, len(answer), 5):
            async with serving(sending(answer[:cut], answer[cut:])) as server:
                assert await whole(server.origin) == BODY

    async def test_an_answer_that_comes_byte_by_byte(self) -> None:
        answer = sized(BODY, b"x-one: 1")
        async with serving(sending(*(answer[place : place + 1] for place in range(len(answer))))) as server:
            assert await whole(server.origin) == BODY

    async def test_what_arrives_together_comes_together_and_what_does_not_comes_at_once(self) -> None:
        go = asyncio.Event()

        async def answer(wire: Wire) -> None:
            await wire.send(CHUNKED + b"3\r\none\r\n3\r\ntwo\r\n")
            await go.wait()
            await wire.send(SECOND_CHUNK + LAST_CHUNK)

        async with serving(answer) as server:
            reply = await ask(server.origin)
            assert (reply.status, await reply.read()) == (200, b"onetwo")
            go.set()
            assert await pieces_of(reply) == [b"three"]

    async def test_the_head_is_there_before_the_body(self) -> None:
        go = asyncio.Event()

        async def answer(wire: Wire) -> None:
            await wire.send(b"HTTP/1.1 418 Teapot\r\ncontent-length: 5\r\n\r\n")
            await go.wait()
            await wire.send(b"short")

        async with serving(answer) as server:
            reply = await ask(server.origin)
            assert reply.status == 418
            go.set()
            assert await pieces_of(reply) == [b"short"]

    @pytest.mark.parametrize("answer", [sized(b""), b"HTTP/1.1 204 No Content\r\n\r\n", CHUNKED + LAST_CHUNK])
    async def test_an_empty_body_ends_at_once(self, answer: bytes) -> None:
        async with serving(sending(answer)) as server:
            assert await whole(server.origin) == b""
            assert len(server.origin.idle) == 1

    async def test_a_body_without_length_ends_with_the_connection(self) -> None:
        async with serving(ending(HEAD + b"\r\n" + BODY[:5], BODY[5:])) as server:
            assert await whole(server.origin) == BODY
            assert not server.origin.open

    async def test_a_word_before_the_answer_is_passed_over(self) -> None:
        async with serving(sending(b"HTTP/1.1 100 Continue\r\n\r\n", chunked(BODY, 7))) as server:
            assert await whole(server.origin) == BODY

    async def test_a_reader_that_is_slow_holds_the_sender_up(self) -> None:
        large = bytes(64 << 20)
        async with serving(sending(sized(large))) as server:
            reply = await ask(server.origin)
            await asyncio.sleep(0.2)
            assert streaming.HELD_LIMIT < reply._held < 2 * streaming.HELD_LIMIT
            assert sum(map(len, await pieces_of(reply))) == len(large)

    async def test_only_the_beginning_of_a_body_can_be_asked_for(self) -> None:
        async with serving(sending(sized(bytes(1 << 20)))) as server:
            with closing(await ask(server.origin)) as reply:
                assert 1000 <= len(await reply.read_up_to(1000)) < 1 << 20
        async with serving(sending(sized(BODY))) as server:
            with closing(await ask(server.origin)) as reply:
                assert await reply.read_up_to(1000) == BODY


class TestReuse:
    @pytest.mark.parametrize("answer", [sized(BODY), chunked(BODY, 7)])
    async def test_one_connection_serves_one_call_after_the_other(self, answer: bytes) -> None:
        async with serving(sending(answer)) as server:
            assert [await whole(server.origin) for _ in range(5)] == [BODY] * 5
        assert [wire.turn for wire in server.wires] == [5]

    async def test_a_hundred_calls_at_once_have_a_hundred_connections_and_their_own_answers(self) -> None:
        async def answer(wire: Wire) -> None:
            said = server.requests[-1].rpartition(b"\r\n")[2]
            await asyncio.sleep(0.05)
            await wire.send(chunked(said * 100, 30))

        async def call(number: int) -> bytes:
            return b"".join(await pieces_of(await server.origin.post("/route", lambda: b"%d;" % number)))

        async with serving(answer) as server:
            for _ in range(2):
                said = await asyncio.gather(*(call(number) for number in range(100)))
                assert said == [b"%d;" % number * 100 for number in range(100)]
        assert len(server.wires) == 100

    @pytest.mark.parametrize(
        "answer",
        [
            sized(BODY, b"connection: close"),
            b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY),
            sized(BODY) + HEAD,
            sized(BODY) + sized(b"an answer too many"),
            sized(BODY) + b"neither head nor body",
        ],
    )
    async def test_a_connection_that_is_at_its_end_or_beyond_is_not_used_again(self, answer: bytes) -> None:
        async with serving(sending(answer)) as server:
            assert [await whole(server.origin) for _ in range(3)] == [BODY] * 3
        assert [wire.turn for wire in server.wires] == [1] * 3

    async def test_a_connection_that_ended_before_its_answer_was_read_is_not_used_again(self) -> None:
        async with serving(ending(sized(BODY))) as server:
            for number in range(2):
                reply = await ask(server.origin)
                await server.until_ended(number + 1)
                await asyncio.sleep(PAUSE)
                assert await pieces_of(reply) == [BODY]
                assert not server.origin.idle

    async def test_an_answer_that_was_not_read_to_its_end_does_not_stand_in_the_way(self) -> None:
        large = bytes(streaming.HELD_LIMIT + 1)
        async with serving(sending(sized(large))) as server:
            with closing(await ask(server.origin)) as reply:
                while not reply._done:
                    await asyncio.sleep(PAUSE)
            assert await whole(server.origin) == large

    async def test_a_connection_that_still_carries_the_request_is_not_used_again(self) -> None:
        async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(sized(BODY))
            await over.wait()
            writer.close()

        over = asyncio.Event()
        async with await asyncio.start_server(hasty, "127.0.0.1", 0) as listener:
            origin = Origin(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", "", 2.0, IDLE)
            reply = await origin.post("/route", lambda: bytes(64 << 20))
            assert b"".join(await pieces_of(reply)) == BODY
            assert not origin.idle
            over.set()

    async def test_what_an_idle_connection_says_unasked_is_nobodys(self) -> None:
        async with serving(sending(sized(BODY))) as server:
            assert await whole(server.origin) == BODY
            await server.wires[0].send(sized(b"unasked"))
            await server.until_ended(1)
            assert await whole(server.origin) == BODY

    async def test_an_idle_connection_is_closed_in_time(self) -> None:
        async with serving(sending(sized(BODY)), idle=0.05) as server:
            assert await whole(server.origin) == BODY
            await server.until_ended(1)
            assert not server.origin.open
            assert await whole(server.origin) == BODY

    async def test_a_connection_in_use_is_not_closed_for_having_been_idle(self) -> None:
        async def answer(wire: Wire) -> None:
            await asyncio.sleep(0.2)
            await wire.send(sized(BODY))

        async with serving(answer, idle=0.1) as server:
            assert [await whole(server.origin) for _ in range(2)] == [BODY] * 2
        assert len(server.wires) == 1

    async def test_servers_that_close_what_is_idle_are_not_noticed(self) -> None:
        async with serving(sending(sized(BODY))) as server:
            for number in range(3):
                assert await whole(server.origin) == BODY
                server.wires[number].writer.close()
                await asyncio.sleep(PAUSE)
                assert not server.origin.open
        assert len(server.wires) == 3

    @pytest.mark.parametrize("reset", [False, True])
    async def test_a_connection_that_dies_as_it_is_used_again_is_replaced(self, reset: bool) -> None:
        async def answer(wire: Wire) -> None:
            if wire.turn == 0:
                await wire.send(sized(BODY))
            elif reset:
                wire.writer.transport.abort()
            else:
                wire.writer.close()

        async with serving(answer) as server:
            assert [await whole(server.origin) for _ in range(3)] == [BODY] * 3
        assert len(server.wires) == 3

    async def test_only_one_is_replaced(self) -> None:
        dead = False

        async def answer(wire: Wire) -> None:
            if dead:
                wire.writer.close()
            else:
                await wire.send(sized(BODY))

        async with serving(answer) as server:
            await asyncio.gather(*(whole(server.origin) for _ in range(4)))
            dead = True
            with pytest.raises(EngineError, match="broke off: it closed the connection without an answer"):
                await ask(server.origin)
        assert len(server.requests) == 6

    async def test_a_connection_that_dies_with_an_answer_begun_is_not_replaced(self) -> None:
        async def answer(wire: Wire) -> None:
            await wire.send(HEAD if wire.turn else sized(BODY))
            if wire.turn:
                wire.writer.close()

        async with serving(answer) as server:
            assert await whole(server.origin) == BODY
            with pytest.raises(EngineError, match="broke off"):
                await ask(server.origin)
        assert len(server.requests) == 2


class TestClosing:
    async def test_closing_early_drops_the_connection(self) -> None:
        async def answer(wire: Wire) -> None:
            await wire.send(CHUNKED + SECOND_CHUNK)
            await wire.request()

        async with serving(answer) as server:
            with closing(await ask(server.origin)) as reply:
                assert await reply.read() == b"three"
            async with asyncio.timeout(0.1):
                await server.until_ended(1)
            assert not server.origin.open

    async def test_a_call_that_is_cancelled_before_the_head_drops_the_connection(self) -> None:
        async def answer(wire: Wire) -> None:
            await wire.request()

        async with serving(answer) as server:
            call = asyncio.ensure_future(ask(server.origin))
            while not server.requests:
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await server.until_ended(1)
            assert not server.origin.open

    async def test_closing_the_origin_ends_what_is_read_and_what_is_idle(self) -> None:
        async def answer(wire: Wire) -> None:
            await wire.send(CHUNKED + SECOND_CHUNK if wire.number == 0 else sized(BODY))

        async with serving(answer) as server:
            reply = await ask(server.origin)
            assert await whole(server.origin) == BODY
            assert await reply.read() == b"three"
            server.origin.close()
            with pytest.raises(EngineError, match="closed on this side"):
                await reply.read()
            await server.until_ended(2)
            with pytest.raises(EngineError, match="are closed"):
                await ask(server.origin)


class TestFaults:
    @pytest.mark.parametrize(
        ("sent", "says"),
        [
            (b"", "it closed the connection without an answer"),
            (HEAD[:7], "in the middle of an answer"),
            (HEAD + b"content-le", "in the middle of an answer"),
            (b"SSH-2.0-OpenSSH_9.2\r\n", "HttpParser"),
            (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", "HttpParserUpgrade"),
        ],
    )
    async def test_a_server_that_ends_before_the_head_is_there(self, sent: bytes, says: str) -> None:
        async with serving(ending(sent), key="the-key") as server:
            with pytest.raises(EngineError, match=f"the engine at {server.origin.url} broke off: .*{says}") as caught:
                await ask(server.origin)
            assert b"the-key" in server.requests[0]
            assert "the-key" not in str(caught.value)
            await server.until_ended(1)
            assert not server.origin.open

    @pytest.mark.parametrize(
        ("sent", "arrives"),
        [
            (CHUNKED, b""),
            (CHUNKED + SECOND_CHUNK, b"three"),
            (CHUNKED + b"5\r\nthr", b"thr"),
            (CHUNKED + SECOND_CHUNK + b"0\r\n", b"three"),
            (CHUNKED + SECOND_CHUNK + b"no length\r\n", b"three"),
            (sized(BODY)[:-1], BODY[:-1]),
        ],
    )
    async def test_a_server_that_ends_in_the_body_is_an_error_after_what_came(self, sent: bytes, arrives: bytes) -> None:
        async with serving(ending(sent)) as server:
            with closing(await ask(server.origin)) as reply:
                arrived = await reply.read_up_to(len(arrives))
                with pytest.raises(EngineError, match="broke off"):
                    await reply.read()
            await server.until_ended(1)
            assert not server.origin.open
        assert arrived == arrives

    async def test_a_reset_is_named(self) -> None:
        async def answer(wire: Wire) -> None:
            await wire.send(CHUNKED)
            wire.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            wire.writer.transport.abort()

        async with serving(answer) as server:
            with closing(await ask(server.origin)) as reply, pytest.raises(EngineError, match="broke off: ConnectionResetError"):
                await reply.read()

    async def test_a_head_without_end(self) -> None:
        async def answer(wire: Wire) -> None:
            await wire.send(HEAD)
            while not wire.writer.is_closing():
                await wire.send(b"x-filler: " + b"x" * 60_000 + b"\r\n")

        async with serving(answer) as server:
            with pytest.raises(EngineError, match="broke off: a head of more than"):
                await ask(server.origin)

    async def test_nobody_listens(self) -> None:
        origin = Origin("http://127.0.0.1:9", "", 2.0, IDLE)
        with pytest.raises(
            EngineError, match=r"no engine answers at http://127\.0\.0\.1:9: is it running\? \(.*refused|.*failed"
        ):
            await ask(origin)

    async def test_a_host_that_does_not_answer_is_given_up(self) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
            port = full.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port)):  # the one that still has room
                origin = Origin(f"http://127.0.0.1:{port}", "", 0.1, IDLE)
                with pytest.raises(EngineError, match=r"is it running\? \(no connection within 0\.1 s\)"):
                    await ask(origin)


class TestTls:
    async def test_a_certificate_that_is_trusted_carries_the_call(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        async with serving(sending(chunked(BODY, 7)), tls=certificate(tmp_path)) as server:
            assert [await whole(server.origin) for _ in range(3)] == [BODY] * 3
        assert len(server.wires) == 1

    async def test_another_is_refused(self, tmp_path: Path) -> None:
        async with serving(sending(sized(BODY)), tls=certificate(tmp_path)) as server:
            with pytest.raises(EngineError, match="no engine answers at .*certificate"):
                await ask(server.origin)
        assert server.requests == []


def certificate(folder: Path) -> ssl.SSLContext:
    """A server's, for localhost, of an authority whose own certificate is put into `folder`."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "cert.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context
