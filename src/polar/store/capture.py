"""The capture file: sessions, calls, token trees and messages of one gateway worker.

A call is in the file before its harness can act on the answer. Nodes never change once written, messages live once for all
sessions, and a call is written again when its status or its delivery is known. Of a model key only the hash comes here.
"""

import asyncio
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from sqlite3 import Connection, IntegrityError

import msgspec
from msgspec import Struct

from polar.errors import StoreError, UsageError
from polar.specs import NO_EXTRAS, HarnessProfile, ReasoningHistory, SamplingSpec
from polar.store.rows import (
    ExtraRow,
    NodeRow,
    Tips,
    encode_body,
    encode_extras,
    encode_numbers,
    encode_settings,
    message_lists,
    node_row,
    to_call,
    to_extras,
    to_node,
)
from polar.store.sqlite import Reader, Schema, Writer
from polar.tokens.records import Call, Node

log = logging.getLogger(__name__)
NOTES_AFTER = 0.05  # seconds
NOTES_AGAIN = 5.0  # seconds after which notes that could not be written are tried again

# Big rows are in the order of writing, so that pages fill up whatever order sessions interleave in; small indices find them.
_SCHEMA = Schema(
    noun="capture file",
    application_id=0x506F6C43,
    steps=(
        """
        CREATE TABLE sessions (
            session INTEGER PRIMARY KEY, session_id TEXT NOT NULL UNIQUE, frozen INTEGER NOT NULL, body BLOB NOT NULL
        ) STRICT;
        CREATE TABLE messages (message INTEGER PRIMARY KEY, hash TEXT NOT NULL UNIQUE, body BLOB NOT NULL) STRICT;
        CREATE TABLE settings (digest BLOB PRIMARY KEY, body BLOB NOT NULL) STRICT;
        CREATE TABLE nodes (
            session INTEGER NOT NULL REFERENCES sessions, node_id INTEGER NOT NULL,
            parent INTEGER NOT NULL, "offset" INTEGER NOT NULL,
            kind TEXT NOT NULL, call_id TEXT NOT NULL, choice INTEGER NOT NULL,
            ids BLOB NOT NULL, logprobs BLOB, versions BLOB NOT NULL,
            UNIQUE (session, node_id),
            CONSTRAINT "a node has at least one token" CHECK (length(ids) > 0),
            CONSTRAINT "a sampled node has one logprob per token, a context node has none"
                CHECK (CASE kind WHEN 'sampled' THEN length(logprobs) IS length(ids) ELSE logprobs IS NULL END)
        ) STRICT;
        CREATE TABLE calls (
            call INTEGER PRIMARY KEY, session INTEGER NOT NULL REFERENCES sessions,
            call_id TEXT NOT NULL, ordinal INTEGER NOT NULL, kind TEXT NOT NULL, status TEXT NOT NULL, delivered INTEGER NOT NULL,
            settings BLOB NOT NULL REFERENCES settings, body BLOB NOT NULL,
            base INTEGER REFERENCES calls, kept INTEGER NOT NULL, added BLOB NOT NULL,
            UNIQUE (session, call_id), UNIQUE (session, ordinal)
        ) STRICT;
        """,
        # Besides, calls.body has another form: hashes are bytes; choices and timings have no names.
        """
        CREATE TABLE extras (
            session INTEGER NOT NULL, node_id INTEGER NOT NULL,
            name TEXT NOT NULL, dtype TEXT NOT NULL, shape TEXT NOT NULL, body BLOB NOT NULL,
            UNIQUE (session, node_id, name), FOREIGN KEY (session, node_id) REFERENCES nodes (session, node_id)
        ) STRICT;
        """,
    ),
    oldest=2,  # no SQL turns the one form of a call's body into the other
)
_NODE_COLUMNS = 'node_id, parent, "offset", kind, call_id, choice, ids, logprobs, versions'
_EXTRA_COLUMNS = "node_id, name, dtype, shape, body"
_CALL_COLUMNS = "call, call_id, ordinal, kind, status, delivered, settings.body, calls.body"


class StoredSession(Struct, frozen=True):
    """A session as the gateway reloads it after a restart.

    Attributes:
        key_hash: SHA-256 of the model key, hex.
        created: unix seconds.
        frozen: closed to further calls.
    """

    session_id: str
    key_hash: str
    task_id: str
    profile: HarnessProfile
    sampling: SamplingSpec
    model: str
    renderer: str
    created: float
    frozen: bool = False
    metadata: dict[str, str] = {}
    reasoning_history: ReasoningHistory = "as_sampled"


_session = msgspec.msgpack.Decoder(StoredSession).decode


class CaptureStore:
    """The one writer of a capture file, owned by one event loop. Each method is durable when it returns.

    Every method raises `StoreError` when the file cannot be written (the message says what to do; later calls work once it
    can), and after `close`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._notes: list[tuple[str, str]] = []
        self._notes_timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._tips = Tips()
        self._writer = Writer.open(path, _SCHEMA, on_rollback=self._tips.clear)

    @classmethod
    def open(cls, path: Path) -> "CaptureStore":
        """Open or create a capture file.

        Raises:
            StoreError: another process writes it, it is not a capture file, damaged, of another schema, or not writable.
        """
        return cls(path)

    async def open_session(self, session: StoredSession) -> None:
        """Add a session. `StoreError` if there is one of this id."""
        row = (session.session_id, session.frozen, msgspec.msgpack.encode(session))

        def work(connection: Connection) -> None:
            cursor = connection.execute("INSERT OR IGNORE INTO sessions (session_id, frozen, body) VALUES (?, ?, ?)", row)
            if not cursor.rowcount:
                raise StoreError(f"session {session.session_id} is already in {self._path}")

        await self._writer.submit(work)

    async def commit(self, session_id: str, nodes: Sequence[Node], calls: Sequence[Call], messages: Mapping[str, bytes]) -> None:
        """Write nodes, calls and messages of a session, all or none.

        Args:
            nodes: new nodes. One that is there already must be equal.
            calls: new calls, or calls again whose status, findings or delivery changed. Order of arrival and messages of a
                call never change, and what was delivered stays delivered.
            messages: hash → bytes of what `calls` name (messages and tools) and the file may not have yet.

        Raises:
            StoreError: also for an unknown session, a node or a call that contradicts a stored one, an ordinal that is
                taken, or a message that is neither given nor stored. Nothing of this commit is written then.
        """
        node_rows = [node_row(node) for node in nodes]
        extra_rows = [row for node in nodes if node.extras for row in encode_extras(node)]
        call_rows = [(call, *encode_settings(call), encode_body(call)) for call in calls]
        message_rows = list(messages.items())
        notes = self._take_notes()

        def work(connection: Connection) -> None:
            session = self._number(connection, session_id)
            connection.executemany("INSERT OR IGNORE INTO messages (hash, body) VALUES (?, ?)", message_rows)
            for row in node_rows:
                _put_node(connection, session, session_id, row)
            for extra in extra_rows:
                _put_extra(connection, session, session_id, extra)
            for call, digest, settings, body in call_rows:
                connection.execute("INSERT OR IGNORE INTO settings (digest, body) VALUES (?, ?)", (digest, settings))
                self._put_call(connection, session, session_id, call, digest, body)
            _put_notes(connection, notes)

        try:
            await self._writer.submit(work)
        except BaseException:
            self._notes[:0] = notes
            if notes:
                self._note_later(NOTES_AGAIN)
            raise

    def note_delivered(self, session_id: str, call_id: str) -> None:
        """Note that the last byte of a call's reply went out: with the next commit, or after `NOTES_AFTER` seconds.

        A call whose note a crash loses counts as not delivered, unless a later prompt holds its answer.
        """
        self._notes.append((session_id, call_id))
        self._note_later(NOTES_AFTER)

    async def flush(self) -> None:
        """Write the notes now. Those that cannot be written go with the next commit; that is logged."""
        if notes := self._take_notes():
            try:
                await self._writer.submit(lambda connection: _put_notes(connection, notes))
            except StoreError as error:
                self._notes[:0] = notes
                self._note_later(NOTES_AGAIN)
                log.warning("the delivery of %d calls is not noted yet: %s", len(notes), error)

    def _note_later(self, seconds: float) -> None:
        if self._notes_timer is None:
            self._notes_timer = asyncio.get_running_loop().call_later(seconds, self._flush_soon)

    def _flush_soon(self) -> None:
        self._notes_timer = None
        self._flushing = asyncio.get_running_loop().create_task(self.flush())

    def _take_notes(self) -> list[tuple[str, str]]:
        if self._notes_timer is not None:
            self._notes_timer.cancel()
            self._notes_timer = None
        notes, self._notes = self._notes, []
        return notes

    async def freeze(self, session_id: str) -> None:
        """Note that a session is closed to further calls; freezing twice is fine."""
        await self.flush()

        def work(connection: Connection) -> None:
            session = self._number(connection, session_id)
            connection.execute("UPDATE sessions SET frozen = 1 WHERE session = ?", (session,))
            self._tips.drop(session)

        await self._writer.submit(work)

    async def close(self) -> None:
        """Write what is queued, fold the WAL into the file, and let others write it. Closing twice is fine."""
        await self.flush()
        self._take_notes()  # nothing is written after this
        await self._writer.close()

    def _number(self, connection: Connection, session_id: str) -> int:
        number = _session_number(connection, session_id)
        if number is None:
            raise StoreError(f"session {session_id} was not opened in {self._path}")
        return number

    def _put_call(self, connection: Connection, session: int, session_id: str, call: Call, digest: bytes, body: bytes) -> None:
        if call.session_id != session_id:
            raise StoreError(f"call {call.call_id} belongs to session {call.session_id}, not to {session_id}")
        stored: tuple[int, int] | None = connection.execute(
            "SELECT call, ordinal FROM calls WHERE session = ? AND call_id = ?", (session, call.call_id)
        ).fetchone()
        if stored is None:
            self._insert_call(connection, session, call, digest, body)
        elif stored[1] != call.ordinal or _message_hashes(connection, session)[stored[0]] != call.message_hashes:
            raise StoreError(f"call {call.call_id} is stored with another ordinal or other messages; these never change")
        else:
            connection.execute(
                "UPDATE calls SET kind = ?, status = ?, delivered = max(delivered, ?), settings = ?, body = ? WHERE call = ?",
                (call.kind, call.status, call.delivered, digest, body, stored[0]),
            )

    def _insert_call(self, connection: Connection, session: int, call: Call, digest: bytes, body: bytes) -> None:
        base, kept = self._tips.base(session, call.message_hashes)
        added = [_message_number(connection, call, value) for value in call.message_hashes[kept:]]
        if call.tools_hash:
            _message_number(connection, call, call.tools_hash)
        try:
            cursor = connection.execute(
                "INSERT INTO calls (session, call_id, ordinal, kind, status, delivered, settings, body, base, kept, added)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(session, call.call_id, call.ordinal, call.kind, call.status, call.delivered, digest, body),
                    *(base, kept, encode_numbers(added)),
                ),
            )
        except IntegrityError as error:
            raise StoreError(f"ordinal {call.ordinal} of session {call.session_id} is taken by another call ({error})") from error
        self._tips.add(session, cursor.lastrowid or 0, call.message_hashes)


def _put_notes(connection: Connection, notes: Sequence[tuple[str, str]]) -> None:
    connection.executemany(
        "UPDATE calls SET delivered = 1 WHERE call_id = ?2 AND session = (SELECT session FROM sessions WHERE session_id = ?1)",
        notes,
    )


def _put_node(connection: Connection, session: int, session_id: str, row: NodeRow) -> None:
    sql = f"INSERT INTO nodes (session, {_NODE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
    try:
        inserted = connection.execute(sql, (session, *row)).rowcount
    except IntegrityError as error:
        raise StoreError(f"node {row[0]} of session {session_id} is refused: {error}") from error
    if inserted:
        return
    stored = f"SELECT {_NODE_COLUMNS} FROM nodes WHERE session = ? AND node_id = ?"
    if connection.execute(stored, (session, row[0])).fetchone() != row:
        raise StoreError(f"node {row[0]} of session {session_id} is stored with other content; nodes never change")


def _put_extra(connection: Connection, session: int, session_id: str, row: ExtraRow) -> None:
    sql = f"INSERT INTO extras (session, {_EXTRA_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
    if connection.execute(sql, (session, *row)).rowcount:
        return
    stored = f"SELECT {_EXTRA_COLUMNS} FROM extras WHERE session = ? AND node_id = ? AND name = ?"
    if connection.execute(stored, (session, *row[:2])).fetchone() != row:
        raise StoreError(f"{row[1]} of node {row[0]} of session {session_id} is stored with other content; nodes never change")


def _message_number(connection: Connection, call: Call, value: str) -> int:
    row: tuple[int] | None = connection.execute("SELECT message FROM messages WHERE hash = ?", (value,)).fetchone()
    if row is None:
        raise StoreError(f"call {call.call_id} names message {value}, which is neither stored nor given with it")
    return row[0]


def _message_hashes(connection: Connection, session: int) -> dict[int, tuple[str, ...]]:
    """Message hashes of every stored call of a session, by the call's row number."""
    rows = connection.execute("SELECT call, base, kept, added FROM calls WHERE session = ? ORDER BY call", (session,))
    lists = message_lists(rows)
    sql = "SELECT message, hash FROM messages WHERE message IN (SELECT value FROM json_each(?))"
    hashes: dict[int, str] = dict(connection.execute(sql, (json.dumps(list(set().union(*lists.values()))),)))
    try:
        return {call: tuple(hashes[number] for number in numbers) for call, numbers in lists.items()}
    except KeyError as missing:
        raise StoreError(f"message {missing} of session row {session} is named by a call and not stored") from None


def _session_number(connection: Connection, session_id: str) -> int | None:
    row: tuple[int] | None = connection.execute("SELECT session FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    return row and row[0]


class CaptureReader:
    """Reads a capture file in any process, also while its writer writes. What a `commit` wrote is seen whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = Reader.open(path, _SCHEMA)

    @classmethod
    def open(cls, path: Path) -> "CaptureReader":
        """Open an existing capture file.

        Raises:
            StoreError: there is none, it is not a capture file, damaged, or of another schema.
        """
        return cls(path)

    def sessions(self) -> list[StoredSession]:
        """All sessions, in the order of opening."""
        with self._reader.snapshot() as connection:
            return [_to_session(*row) for row in connection.execute("SELECT frozen, body FROM sessions ORDER BY session")]

    def session(self, session_id: str) -> StoredSession:
        """One session. `UsageError` if the file has none of this id."""
        with self._reader.snapshot() as connection:
            session = self._number(connection, session_id)
            return _to_session(*connection.execute("SELECT frozen, body FROM sessions WHERE session = ?", (session,)).fetchone())

    def calls(self, session_id: str) -> list[Call]:
        """The calls of a session by ordinal, `delivered` as last noted. `UsageError` for an unknown session."""
        sql = f"SELECT {_CALL_COLUMNS} FROM calls JOIN settings ON digest = settings WHERE session = ? ORDER BY ordinal"
        with self._reader.snapshot() as connection:
            session = self._number(connection, session_id)
            hashes = _message_hashes(connection, session)
            return [to_call(session_id, hashes[number], *row) for number, *row in connection.execute(sql, (session,))]

    def nodes(self, session_id: str) -> list[Node]:
        """The nodes of a session by id, their arrays read-only. Read after `calls`, they hold every node that a call names."""
        sql = f"SELECT {_NODE_COLUMNS} FROM nodes WHERE session = ? ORDER BY node_id"
        with self._reader.snapshot() as connection:
            session = self._number(connection, session_id)
            extras = to_extras(connection.execute(f"SELECT {_EXTRA_COLUMNS} FROM extras WHERE session = ?", (session,)))
            return [to_node(*row, extras=extras.get(row[0], NO_EXTRAS)) for row in connection.execute(sql, (session,))]

    def messages(self, hashes: Iterable[str]) -> dict[str, bytes]:
        """hash → bytes. `StoreError` naming a hash that is not stored."""
        wanted = list(hashes)
        sql = "SELECT hash, body FROM messages WHERE hash IN (SELECT value FROM json_each(?))"
        with self._reader.snapshot() as connection:
            found: dict[str, bytes] = dict(connection.execute(sql, (json.dumps(wanted),)))
        missing = [value for value in wanted if value not in found]
        if missing:
            raise StoreError(f"{len(missing)} of {len(wanted)} messages are not in {self._path}; the first is {missing[0]}")
        return found

    def _number(self, connection: Connection, session_id: str) -> int:
        number = _session_number(connection, session_id)
        if number is None:
            raise UsageError(f"there is no session {session_id} in {self._path}")
        return number

    def close(self) -> None:
        """Give the connection back."""
        self._reader.close()


def _to_session(frozen: int, body: bytes) -> StoredSession:
    return msgspec.structs.replace(_session(body), frozen=bool(frozen))
