"""The ledger of a run: its tasks, sessions, stage changes, results and settings.

Each change is one transaction, so that a run that was killed goes on where it stood: what is finished stays finished.
"""

import time
from pathlib import Path
from sqlite3 import Connection

import msgspec
from msgspec import Struct

from polar.errors import StoreError, UsageError
from polar.specs import SessionResult, Stage, Task
from polar.store.sqlite import Reader, Schema, Writer

_SCHEMA = Schema(
    noun="ledger",
    application_id=0x506F6C4C,
    steps=(
        """
        CREATE TABLE tasks (task_id TEXT PRIMARY KEY, position INTEGER NOT NULL, body BLOB NOT NULL) STRICT;
        CREATE TABLE sessions (
            session_id TEXT PRIMARY KEY, task_id TEXT NOT NULL REFERENCES tasks,
            sample INTEGER NOT NULL, attempt INTEGER NOT NULL,
            stage TEXT NOT NULL, started REAL NOT NULL, result BLOB,
            UNIQUE (task_id, sample, attempt)
        ) STRICT;
        CREATE TABLE stage_changes (session_id TEXT NOT NULL REFERENCES sessions, stage TEXT NOT NULL, time REAL NOT NULL) STRICT;
        CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
        """,
    ),
)
# Not JSON, which has no infinite timeout.
_encode = msgspec.msgpack.Encoder().encode
_task = msgspec.msgpack.Decoder(Task).decode
_result = msgspec.msgpack.Decoder(SessionResult).decode


class LedgerSession(Struct, frozen=True):
    """One attempt at one sample of a task.

    Attributes:
        attempt: 0, 1, … ; a further one follows an attempt that infrastructure failed.
        started: unix seconds when it was added.
        result: None until it is finished.
    """

    session_id: str
    task_id: str
    sample: int
    attempt: int
    stage: Stage
    started: float
    result: SessionResult | None


def _to_session(
    session_id: str, task_id: str, sample: int, attempt: int, stage: Stage, started: float, result: bytes | None
) -> LedgerSession:
    finished = None if result is None else _result(result)
    return LedgerSession(session_id, task_id, sample, attempt, stage, started, finished)


class LedgerReader:
    """Reads a ledger in any process, also while the run goes on."""

    def __init__(self, path: Path) -> None:
        self._reader = Reader.open(path, _SCHEMA)

    @classmethod
    def open(cls, path: Path) -> "LedgerReader":
        """Open an existing ledger.

        Raises:
            StoreError: there is none, it is not a ledger, damaged, or of another schema.
        """
        return cls(path)

    def tasks(self) -> list[Task]:
        """The run's tasks in order of position."""
        with self._reader.snapshot() as connection:
            return [_task(body) for (body,) in connection.execute("SELECT body FROM tasks ORDER BY position, rowid")]

    def sessions(self) -> list[LedgerSession]:
        """All attempts, ordered by position of the task, sample and attempt."""
        sql = (
            "SELECT session_id, task_id, sample, attempt, stage, started, result FROM sessions JOIN tasks USING (task_id)"
            " ORDER BY position, tasks.rowid, sample, attempt"
        )
        with self._reader.snapshot() as connection:
            return [_to_session(*row) for row in connection.execute(sql)]

    def meta(self) -> dict[str, str]:
        """The run's settings."""
        with self._reader.snapshot() as connection:
            return dict(connection.execute("SELECT name, value FROM meta ORDER BY name"))

    def close(self) -> None:
        """Give the connection back."""
        self._reader.close()


class Ledger:
    """The one writer of a ledger, owned by one event loop. Each change is durable when it returns.

    Every method raises `StoreError` when the file cannot be written (the message says what to do; later calls work once it
    can), and after `close`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = Writer.open(path, _SCHEMA)
        self._reader = LedgerReader.open(path)

    @classmethod
    def open(cls, path: Path) -> "Ledger":
        """Open or create a ledger.

        Raises:
            StoreError: another process writes it, it is not a ledger, damaged, of a newer schema, or not writable.
        """
        return cls(path)

    async def add_task(self, task: Task, position: int) -> None:
        """Add a task; the same task again is fine and keeps its position.

        Raises:
            UsageError: another task has this id, naming the fields that differ.
        """
        body = _encode(task)

        def work(connection: Connection) -> None:
            sql = "INSERT INTO tasks (task_id, position, body) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
            if not connection.execute(sql, (task.id, position, body)).rowcount:
                stored: tuple[bytes] = connection.execute("SELECT body FROM tasks WHERE task_id = ?", (task.id,)).fetchone()
                self._refuse_change(_task(stored[0]), task)

        await self._writer.submit(work)

    async def add_session(self, session_id: str, task_id: str, sample: int, attempt: int) -> None:
        """Add an attempt, in stage `queued`. `StoreError` for an unknown task, or an id or attempt that is there already."""
        now = time.time()

        def work(connection: Connection) -> None:
            if connection.execute("SELECT 1 FROM tasks WHERE task_id = ?", (task_id,)).fetchone() is None:
                raise StoreError(f"session {session_id} is of task {task_id}, which is not in {self._path}")
            sql = (
                "INSERT INTO sessions (session_id, task_id, sample, attempt, stage, started) VALUES (?, ?, ?, ?, 'queued', ?)"
                " ON CONFLICT DO NOTHING"
            )
            if not connection.execute(sql, (session_id, task_id, sample, attempt, now)).rowcount:
                raise StoreError(
                    f"session {session_id}, or attempt {attempt} at sample {sample} of task {task_id}, is already in {self._path}"
                )
            _note_stage(connection, session_id, "queued", now)

        await self._writer.submit(work)

    async def set_stage(self, session_id: str, stage: Stage) -> None:
        """Note that a session enters a stage now. `StoreError` if it is unknown or done, or for `done`, which `finish` sets."""
        if stage == "done":
            raise StoreError(f"session {session_id} is done only with its result: call finish")
        now = time.time()

        def work(connection: Connection) -> None:
            self._refuse_finished(connection, session_id)
            connection.execute("UPDATE sessions SET stage = ? WHERE session_id = ?", (stage, session_id))
            _note_stage(connection, session_id, stage, now)

        await self._writer.submit(work)

    async def finish(self, result: SessionResult) -> None:
        """Store a session's result, and stage `done` with it. `StoreError` if it is unknown or finished."""
        now = time.time()
        body = _encode(result)

        def work(connection: Connection) -> None:
            self._refuse_finished(connection, result.session_id)
            sql = "UPDATE sessions SET stage = 'done', result = ? WHERE session_id = ?"
            connection.execute(sql, (body, result.session_id))
            _note_stage(connection, result.session_id, "done", now)

        await self._writer.submit(work)

    async def set_meta(self, name: str, value: str) -> None:
        """Set one of the run's settings (engine, model, sandbox, versions)."""
        sql = "INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"

        def work(connection: Connection) -> None:
            connection.execute(sql, (name, value))

        await self._writer.submit(work)

    def tasks(self) -> list[Task]:
        """As `LedgerReader.tasks`."""
        return self._reader.tasks()

    def sessions(self) -> list[LedgerSession]:
        """As `LedgerReader.sessions`."""
        return self._reader.sessions()

    def meta(self) -> dict[str, str]:
        """As `LedgerReader.meta`."""
        return self._reader.meta()

    async def close(self) -> None:
        """Write what is queued, fold the WAL into the file, and let others write it. Closing twice is fine."""
        self._reader.close()
        await self._writer.close()

    def _refuse_change(self, stored: Task, task: Task) -> None:
        changed = [name for name in Task.__struct_fields__ if getattr(stored, name) != getattr(task, name)]
        if changed:
            raise UsageError(
                f"task {task.id} is already in {self._path} with other {', '.join(changed)}; "
                "give the changed task another id, or begin a new run in another directory"
            )

    def _refuse_finished(self, connection: Connection, session_id: str) -> None:
        row: tuple[bool] | None = connection.execute(
            "SELECT result IS NOT NULL FROM sessions WHERE session_id = ?", (session_id,)
        ).fetchone()
        if row is None:
            raise StoreError(f"session {session_id} is not in {self._path}")
        if row[0]:
            raise StoreError(f"session {session_id} is finished in {self._path}; a result never changes")


def _note_stage(connection: Connection, session_id: str, stage: Stage, now: float) -> None:
    connection.execute("INSERT INTO stage_changes (session_id, stage, time) VALUES (?, ?, ?)", (session_id, stage, now))
