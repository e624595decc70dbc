"""What the capture file and the ledger share: opening a file, its schema version, and the one thread that writes it.

A write is durable when it returns (WAL, `synchronous=FULL`) and never runs on the event loop. Everything queued while one
transaction ran goes into the next (group commit), so that many callers share the cost of one fsync.
"""

import asyncio
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from sqlite3 import Connection
from typing import Any

import msgspec
from msgspec import Struct

from polar.errors import StoreError

Work = Callable[[Connection], None]

_SAFE = "run the same command again: everything committed so far is safe"
# Rows of tokens are 1 to 4 kB: in SQLite's default pages of 4 kB every second one would leave a hole.
_PAGE_BYTES = 8192


class Schema(Struct, frozen=True):
    """A kind of store.

    Attributes:
        noun: what a user calls it.
        application_id: written into the file's header, to tell it from any other SQLite file.
        steps: SQL scripts; step `i` brings a file from version `i` to `i + 1`. Never edited, only appended to.
        oldest: the first version whose files are taken: before it, blobs had a form that is not read any more.
    """

    noun: str
    application_id: int
    steps: tuple[str, ...]
    oldest: int = 0

    @property
    def version(self) -> int:
        return len(self.steps)


def store_error(path: Path, doing: str, error: sqlite3.Error) -> StoreError:
    """The `StoreError` for what SQLite said while `doing` ("read" or "write"): what happened and what to do."""
    # An error of the Python module itself (a value of a wrong type) carries no code of SQLite's.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    match code:
        case sqlite3.SQLITE_FULL:
            text = f"cannot write {path}: disk full; free space and {_SAFE}"
        case sqlite3.SQLITE_IOERR:
            text = f"cannot {doing} {path}: I/O error ({name}); check the disk and its free space, and {_SAFE}"
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_CANTOPEN:
            text = f"cannot {doing} {path}: {error}; make the file and its directory writable for you, and {_SAFE}"
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            text = f"cannot {doing} {path}: another program holds it locked (an SQLite shell?); close that, and {_SAFE}"
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            text = damaged(path, str(error))
        case _:
            text = f"cannot {doing} {path}: {error} ({name})"
    return StoreError(text)


def damaged(path: Path, what: str) -> str:
    """The message for a file that cannot be understood."""
    return f"{path} is damaged ({what}); restore it from a copy, or save what is readable with `sqlite3 {path} .recover`"


class Reader:
    """A read-only connection for one thread at a time; works in any process, also while a writer writes."""

    def __init__(self, path: Path, connection: Connection) -> None:
        self._path = path
        self._connection: Connection | None = connection

    @classmethod
    def open(cls, path: Path, schema: Schema) -> "Reader":
        """Open an existing file of this schema.

        Raises:
            StoreError: there is no such file, it is of another kind or version, or it is damaged.
        """
        if not path.exists():
            raise StoreError(f"there is no {schema.noun} at {path}")
        # SQLite wants to make a WAL beside the file; where it may not (a read-only mount), a file without one is at rest.
        at_rest = not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists()
        address = f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if at_rest else ''}"
        try:
            connection = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise store_error(path, "read", error) from error
        try:
            found = _version(path, connection, schema)
            if found < schema.version:
                raise StoreError(
                    f"{path} is a {schema.noun} of schema {found}, this Polar reads schema {schema.version}; "
                    "continue its run with this Polar once: that brings it up to date"
                )
        except StoreError:
            connection.close()
            raise
        return cls(path, connection)

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """The file as it is now, for the queries inside.

        Raises:
            StoreError: the reader is closed, or the file cannot be read, or what is read cannot be decoded.
        """
        if self._connection is None:
            raise StoreError(f"cannot read {self._path}: this reader was closed")
        try:
            self._connection.execute("BEGIN")
            try:
                yield self._connection
            finally:
                if self._connection.in_transaction:  # damage found by SQLite ends it already
                    self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise store_error(self._path, "read", error) from error
        except msgspec.MsgspecError as error:
            raise StoreError(damaged(self._path, str(error))) from error

    def close(self) -> None:
        """Give the connection back; closing twice is fine."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Job(Struct, frozen=True):
    work: Work
    future: "asyncio.Future[None]"


class Writer:
    """The one writer of a file, owned by one event loop. SQLite is touched by its thread alone."""

    def __init__(self, path: Path, connection: Connection, lock: int, on_rollback: Callable[[], None]) -> None:
        self._path = path
        self._connection = connection
        self._lock = lock
        self._on_rollback = on_rollback
        self._closed = False
        # The future of `close` is the last thing in the queue.
        self._queue: SimpleQueue[_Job | asyncio.Future[None]] = SimpleQueue()
        # A daemon: a process that forgot to close must still end, and a transaction cut short is rolled back at the next open.
        threading.Thread(target=self._run, name=f"polar-store {path.name}", daemon=True).start()

    @classmethod
    def open(cls, path: Path, schema: Schema, on_rollback: Callable[[], None] = lambda: None) -> "Writer":
        """Open or create a file, and bring its schema up to date.

        Args:
            on_rollback: called on the writer's thread when a transaction was undone, to drop what its work remembered.

        Raises:
            StoreError: another process writes it, it is of another kind, of a newer schema or one that is too old, damaged, or
                not writable.
        """
        lock = _lock(path)
        try:
            connection = _connect(path, schema)
        except BaseException:
            os.close(lock)
            raise
        return cls(path, connection, lock, on_rollback)

    async def submit(self, work: Work) -> None:
        """Run `work` in a transaction on the writer's thread; it is on disk when this returns.

        `work` may run again after a rollback. If the caller is cancelled meanwhile, it may or may not be written.

        Raises:
            StoreError: the writer is closed, or the file could not be written.
            Exception: whatever `work` raised; nothing of it is written, and no other caller is affected.
        """
        if self._closed:
            raise StoreError(f"cannot write {self._path}: it was closed")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(_Job(work, future))
        await future

    async def close(self) -> None:
        """Write what is queued, move the WAL into the file, release the lock. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(future)
        await future

    def _run(self) -> None:
        while True:
            jobs, closing = self._take()
            if jobs:
                # All futures belong to the owner's loop, so one wake-up settles them all.
                futures = [job.future for job in jobs]
                futures[0].get_loop().call_soon_threadsafe(_settle, futures, self._commit(jobs))
            if closing:
                self._shut()
                closing.get_loop().call_soon_threadsafe(_settle, [closing], [None])
                return

    def _take(self) -> "tuple[list[_Job], asyncio.Future[None] | None]":
        """Wait for a job, then take everything that queued up behind it."""
        jobs: list[_Job] = []
        item = self._queue.get()
        with suppress(Empty):
            while isinstance(item, _Job):
                jobs.append(item)
                item = self._queue.get_nowait()
            return jobs, item
        return jobs, None

    def _commit(self, jobs: Sequence[_Job]) -> list[Exception | None]:
        """Commit the jobs together; if that fails, in halves, until what fails stands alone."""
        try:
            self._transaction(jobs)
        except Exception as error:
            if len(jobs) == 1:
                return [self._explain(error)]
            middle = len(jobs) // 2
            return self._commit(jobs[:middle]) + self._commit(jobs[middle:])
        return [None] * len(jobs)

    def _transaction(self, jobs: Sequence[_Job]) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for job in jobs:
                job.work(self._connection)
            self._connection.execute("COMMIT")
        except BaseException:
            # A full disk may already have rolled back on SQLite's own account.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._on_rollback()
            raise

    def _explain(self, error: Exception) -> Exception:
        if not isinstance(error, sqlite3.Error):
            return error
        explained = store_error(self._path, "write", error)
        explained.__cause__ = error
        return explained

    def _shut(self) -> None:
        # A checkpoint that fails (full disk) loses nothing: the next open reads the WAL.
        with suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()
        os.close(self._lock)


def _settle(futures: "Sequence[asyncio.Future[None]]", outcomes: Sequence[Exception | None]) -> None:
    for future, error in zip(futures, outcomes, strict=True):
        if future.done():  # its caller was cancelled
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _lock(path: Path) -> int:
    """Take the writer's lock beside the file; the kernel drops it when the process dies."""
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}; its directory must exist and be writable for you") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(lock, 20, 0).decode()
        os.close(lock)
        raise StoreError(f"{path} is being written by process {holder}; wait for it or stop it: a file has one writer") from error
    except OSError as error:
        os.close(lock)
        raise StoreError(f"cannot write {path}.lock: {error.strerror}; free space and {_SAFE}") from error
    return lock


def _connect(path: Path, schema: Schema) -> Connection:
    connection: Connection | None = None
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        found = _version(path, connection, schema)
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        _migrate(connection, schema, found)
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, sqlite3.Error):
            raise store_error(path, "write", error) from error
        raise
    return connection


def _version(path: Path, connection: Connection, schema: Schema) -> int:
    """Schema version of the file, 0 for a new one.

    Raises:
        StoreError: not a file of this kind, or of a newer schema, or of one that is too old.
    """
    try:
        application_id, version, tables = (_single(connection, sql) for sql in _IDENTITY)
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_NOTADB:
            raise StoreError(
                f"{path} is not a Polar {schema.noun}, or its header is damaged; give another path, or restore it from a copy"
            ) from error
        raise store_error(path, "read", error) from error
    if tables and application_id != schema.application_id:
        raise StoreError(f"{path} is not a Polar {schema.noun} but another SQLite file; give another path")
    if version > schema.version:
        raise StoreError(
            f"{path} is a {schema.noun} of schema {version}, this Polar knows schema {schema.version}; upgrade Polar to use it"
        )
    if tables and version < schema.oldest:
        raise StoreError(
            f"{path} is a {schema.noun} of schema {version}, this Polar reads schema {schema.oldest} and later; "
            "export it with the Polar that wrote it, or start a new run"
        )
    return version


_IDENTITY = ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_schema")


def _single(connection: Connection, sql: str) -> int:
    value: Any = connection.execute(sql).fetchone()[0]
    return int(value)


def _migrate(connection: Connection, schema: Schema, found: int) -> None:
    for version, step in enumerate(schema.steps[found:], start=found + 1):
        connection.executescript(
            f"BEGIN IMMEDIATE; {step}; PRAGMA application_id = {schema.application_id}; PRAGMA user_version = {version}; COMMIT"
        )
