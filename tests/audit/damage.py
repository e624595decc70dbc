"""Changes that a finished run must not survive unnoticed, made behind Polar's back with plain SQL."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from polar.rollout.folder import RunFolder
from polar.specs import SessionResult
from polar.store.rows import CallBody

WORK, REWRITE, CUT, HANG_UP = 1, 2, 3, 4  # row numbers of the sessions of `folders.SESSIONS`


class Damage:
    """One run folder under attack. Nodes and calls are named by session, then node id or ordinal."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def capture(self, sql: str, *values: object) -> list[Any]:
        """Run SQL on the capture file."""
        return self._run(self._folder.capture, sql, values)

    def ledger(self, sql: str, *values: object) -> list[Any]:
        """Run SQL on the ledger."""
        return self._run(self._folder.ledger, sql, values)

    def sampled(self, session: int, place: int = -1) -> int:
        """Id of the `place`-th sampled node of a session."""
        sql = "SELECT node_id FROM nodes WHERE session = ? AND kind = 'sampled' ORDER BY node_id"
        return int(self.capture(sql, session)[place][0])

    def ids(self, session: int, node: int, change: Callable[[NDArray[np.int32]], None]) -> None:
        """Change the ids of a node in place."""
        self._array(session, node, "ids", "<i4", change)

    def logprobs(self, session: int, node: int, change: Callable[[NDArray[np.float32]], None]) -> None:
        """Change the log-probabilities of a sampled node in place."""
        self._array(session, node, "logprobs", "<f4", change)

    def node(self, session: int, node: int, column: str, value: object) -> None:
        """Set a column of a node."""
        self.capture(f'UPDATE nodes SET "{column}" = ? WHERE session = ? AND node_id = ?', value, session, node)

    def body(self, session: int, ordinal: int) -> CallBody:
        """What is stored of a call."""
        found = self.capture("SELECT body FROM calls WHERE session = ? AND ordinal = ?", session, ordinal)
        return msgspec.msgpack.decode(found[0][0], type=CallBody)

    def call(self, session: int, ordinal: int, **fields: object) -> None:
        """Change fields of a call."""
        changed = msgspec.structs.replace(self.body(session, ordinal), **fields)
        sql = "UPDATE calls SET body = ? WHERE session = ? AND ordinal = ?"
        self.capture(sql, msgspec.msgpack.encode(changed), session, ordinal)

    def result(self, session: int, **fields: object) -> None:
        """Change fields of a session's result in the ledger."""
        rowid, body = self.ledger("SELECT rowid, result FROM sessions ORDER BY rowid")[session - 1]
        changed = msgspec.structs.replace(msgspec.msgpack.decode(body, type=SessionResult), **fields)
        self.ledger("UPDATE sessions SET result = ? WHERE rowid = ?", msgspec.msgpack.encode(changed), rowid)

    def _array(self, session: int, node: int, column: str, dtype: str, change: Callable[[NDArray[Any]], None]) -> None:
        found = self.capture(f"SELECT {column} FROM nodes WHERE session = ? AND node_id = ?", session, node)
        array = np.frombuffer(found[0][0], dtype).copy()
        change(array)
        self.node(session, node, column, array.tobytes())

    def _run(self, path: object, sql: str, values: tuple[object, ...]) -> list[Any]:
        with closing(sqlite3.connect(str(path))) as connection, connection:
            return connection.execute(sql, values).fetchall()
