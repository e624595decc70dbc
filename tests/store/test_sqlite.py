"""What the machinery of both stores promises: durability, one writer, schema versions, and errors that say what to do."""

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from sqlite3 import Connection

import pytest

from polar.errors import StoreError
from polar.store.capture import CaptureReader, CaptureStore
from polar.store.ledger import Ledger
from polar.store.sqlite import Reader, Schema, Work, Writer
from polar.tokens.records import Node
from tests.store.samples import context, session

WORDS = Schema("word list", 77, ("CREATE TABLE words (word TEXT PRIMARY KEY) STRICT",))
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "words.sqlite"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    directory = tmp_path / "small"
    directory.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory], check=False).returncode:
        pytest.skip("this container lets nobody mount; the tests with a page limit still run")
    yield directory
    subprocess.run(["umount", "-l", directory], check=True)


def add(word: str) -> Work:
    def work(connection: Connection) -> None:
        connection.execute("INSERT INTO words VALUES (?)", (word,))

    return work


def words(path: Path, schema: Schema = WORDS) -> list[str]:
    reader = Reader.open(path, schema)
    with reader.snapshot() as connection:
        found = [word for (word,) in connection.execute("SELECT word FROM words ORDER BY rowid")]
    reader.close()
    return found


# Durability

COMMIT_FOREVER = """
import asyncio, itertools, sys
from pathlib import Path
from polar.store.capture import CaptureStore
from tests.store.samples import context, session

async def main():
    store = CaptureStore.open(Path(sys.argv[1]))
    await store.open_session(session())
    numbers = itertools.count()

    async def caller():
        while True:
            number = next(numbers)
            await store.commit("s1", [context(number, [number])], [], {})
            print(number, flush=True)

    await asyncio.gather(*(caller() for _ in range(4)))

asyncio.run(main())
"""


def test_what_was_committed_survives_kill_9(path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", COMMIT_FOREVER, path], stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    committed = [int(process.stdout.readline()) for _ in range(100)]
    process.send_signal(signal.SIGKILL)
    committed += [int(line) for line in process.stdout.read().splitlines()]
    process.wait()
    stored = {node.node_id: node.ids.tolist() for node in CaptureReader.open(path).nodes("s1")}
    assert {number: stored.get(number) for number in committed} == {number: [number] for number in committed}


def test_a_store_goes_on_after_kill_9(path: Path) -> None:
    program = COMMIT_FOREVER.replace("print(number, flush=True)", "import os; os.kill(os.getpid(), 9)")
    killed = subprocess.run([sys.executable, "-c", program, path], check=False, env=environment())
    assert killed.returncode == -signal.SIGKILL
    asyncio.run(commit(path, context(99, [99])))
    assert CaptureReader.open(path).nodes("s1")[-1].node_id == 99


async def commit(path: Path, *nodes: Node) -> None:
    """Open the store, write the nodes, close it."""
    store = CaptureStore.open(path)
    await store.commit("s1", nodes, [], {})
    await store.close()


async def test_each_commit_is_synced_to_the_disk(path: Path) -> None:
    settings: list[object] = []

    def look(connection: Connection) -> None:
        settings.extend(connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous"))

    writer = Writer.open(path, WORDS)
    await writer.submit(look)
    await writer.close()
    assert settings == ["wal", 2]  # 2 is FULL


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


async def test_sqlite_never_runs_on_the_event_loop(path: Path) -> None:
    writer = Writer.open(path, WORDS)
    threads: set[int] = set()
    for _ in range(2):
        await writer.submit(lambda _: threads.add(threading.get_ident()))
    await writer.close()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_callers_that_wait_together_share_a_transaction(path: Path) -> None:
    writer = Writer.open(path, WORDS)
    statements: list[str] = []
    await writer.submit(lambda connection: connection.set_trace_callback(statements.append))
    statements.clear()
    await asyncio.gather(*(writer.submit(add(str(number))) for number in range(100)))
    await writer.close()
    assert 1 <= statements.count("COMMIT") <= 5
    assert len(words(path)) == 100


async def test_an_error_of_one_caller_reaches_that_caller_alone(path: Path) -> None:
    def bug(_: Connection) -> None:
        raise ZeroDivisionError("a bug")

    writer = Writer.open(path, WORDS)
    jobs = [add("one"), bug, add("two"), add("one"), add("three")]
    outcomes = await asyncio.gather(*map(writer.submit, jobs), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), ZeroDivisionError, type(None), StoreError, type(None)]
    assert "UNIQUE constraint failed: words.word" in str(outcomes[3])
    await writer.close()
    assert words(path) == ["one", "two", "three"]


async def test_a_caller_that_is_cancelled_disturbs_nobody(path: Path) -> None:
    writer = Writer.open(path, WORDS)
    first = asyncio.create_task(writer.submit(add("one")))
    await asyncio.sleep(0)
    first.cancel()
    await writer.submit(add("two"))
    await writer.close()
    assert words(path)[-1] == "two"


async def test_close_writes_what_is_queued_and_leaves_one_file(path: Path) -> None:
    writer = Writer.open(path, WORDS)
    queued = [asyncio.create_task(writer.submit(add(str(number)))) for number in range(10)]
    await asyncio.sleep(0)
    await writer.close()
    await asyncio.gather(*queued)
    assert sorted(os.listdir(path.parent)) == [path.name, f"{path.name}.lock"]
    assert len(words(path)) == 10


async def test_calls_after_close_are_refused(path: Path) -> None:
    store = CaptureStore.open(path)
    await store.open_session(session())
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match=f"cannot write {path}: it was closed"):
        await store.freeze("s1")
    reader = CaptureReader.open(path)
    reader.close()
    reader.close()
    with pytest.raises(StoreError, match=f"cannot read {path}: this reader was closed"):
        reader.sessions()


# A full disk


@ROOT_ONLY
async def test_a_full_disk_is_named_and_the_writer_goes_on_once_there_is_space(small_disk: Path) -> None:
    store = CaptureStore.open(small_disk / "capture.sqlite")
    await store.open_session(session())
    await store.commit("s1", [context(0, [1])], [], {})
    ballast = fill(small_disk)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"disk full; free space and run the same command again: everything committed"):
            await store.commit("s1", [context(1, [2] * 50_000)], [], {})
    ballast.unlink()
    await store.commit("s1", [context(1, [3] * 50_000)], [], {})
    await store.close()
    assert [node.ids[0] for node in CaptureReader.open(small_disk / "capture.sqlite").nodes("s1")] == [1, 3]


def fill(directory: Path) -> Path:
    """Leave no free byte."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (4096, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return ballast


@ROOT_ONLY
def test_a_full_disk_is_named_at_open(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(StoreError, match=r"(No space left on device|disk full); free space"):
        CaptureStore.open(small_disk / "capture.sqlite")


async def test_a_small_commit_still_fits_beside_one_that_does_not(path: Path) -> None:
    writer = Writer.open(path, WORDS)
    await writer.submit(limit_pages(10))
    jobs = [add("one"), add("x" * 200_000), add("two")]
    outcomes = await asyncio.gather(*map(writer.submit, jobs), return_exceptions=True)
    assert (outcomes[0], outcomes[2]) == (None, None)
    with pytest.raises(StoreError, match=f"cannot write {path}: disk full; free space"):
        raise outcomes[1] or AssertionError
    await writer.submit(limit_pages(1_000_000))
    await writer.submit(add("x" * 200_000))
    await writer.close()
    assert words(path) == ["one", "two", "x" * 200_000]


def limit_pages(count: int) -> Work:
    """Let the file be full at this size."""

    def work(connection: Connection) -> None:
        connection.execute(f"PRAGMA max_page_count = {count}")

    return work


# One writer

HOLD = """
import sys
from pathlib import Path
from polar.store.ledger import Ledger
ledger = Ledger.open(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_writer_is_refused_and_a_dead_one_is_not_waited_for(path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    with pytest.raises(StoreError, match=f"{path} is being written by process {holder.pid};"):
        Ledger.open(path)
    holder.kill()
    holder.wait()
    assert asyncio.run(close(Ledger.open(path))) is None


async def close(ledger: Ledger) -> None:
    await ledger.close()


def test_a_file_that_could_not_be_opened_is_not_locked(path: Path) -> None:
    path.write_bytes(b"not a store, for sure" * 1000)
    for _ in range(2):
        with pytest.raises(StoreError, match="is not a Polar ledger"):
            Ledger.open(path)


# Which files are taken


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(StoreError, match=f"there is no word list at {path}"):
        Reader.open(path, WORDS)
    with pytest.raises(StoreError, match="No such file or directory; its directory must exist"):
        Writer.open(path.parent / "missing" / "words.sqlite", WORDS)


async def test_a_newer_file_asks_for_a_newer_polar(path: Path) -> None:
    newer = Schema("word list", 77, (*WORDS.steps, "SELECT 1"))
    await Writer.open(path, newer).close()
    for opener in (Writer, Reader):
        with pytest.raises(StoreError, match=r"is a word list of schema 2, this Polar knows schema 1; upgrade Polar"):
            opener.open(path, WORDS)


async def test_an_older_file_is_brought_up_to_date_by_its_writer(path: Path) -> None:
    writer = Writer.open(path, WORDS)
    await writer.submit(add("one"))
    await writer.close()
    newer = Schema("word list", 77, (*WORDS.steps, "ALTER TABLE words ADD COLUMN length INTEGER; UPDATE words SET length = 3"))
    with pytest.raises(StoreError, match="of schema 1, this Polar reads schema 2; continue its run"):
        Reader.open(path, newer)
    await Writer.open(path, newer).close()
    assert words(path, newer) == ["one"]


async def test_a_file_of_a_form_that_is_not_read_any_more_is_refused_and_left_alone(path: Path) -> None:
    await Writer.open(path, WORDS).close()
    before = path.read_bytes()
    newer = Schema("word list", 77, (*WORDS.steps, "SELECT 1"), oldest=2)
    for opener in (Writer, Reader):
        with pytest.raises(StoreError, match=r"of schema 1, this Polar reads schema 2 and later; export it with the Polar that"):
            opener.open(path, newer)
    assert path.read_bytes() == before
    await Writer.open(path.parent / "new.sqlite", newer).close()
    assert words(path.parent / "new.sqlite", newer) == []


def test_a_capture_file_whose_calls_have_names_is_refused(path: Path) -> None:
    asyncio.run(open_session(path))
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 1")
    for opener in (CaptureStore, CaptureReader):
        with pytest.raises(StoreError, match="is a capture file of schema 1, this Polar reads schema 2 and later"):
            opener.open(path)


async def test_a_migration_that_fails_changes_nothing(path: Path) -> None:
    await Writer.open(path, WORDS).close()
    with pytest.raises(StoreError, match="no such table: nowhere"):
        Writer.open(path, Schema("word list", 77, (*WORDS.steps, "DROP TABLE words; INSERT INTO nowhere VALUES (1)")))
    assert words(path) == []


async def test_a_store_of_another_kind_is_refused(path: Path) -> None:
    await Ledger.open(path).close()
    with pytest.raises(StoreError, match="is not a Polar capture file but another SQLite file"):
        CaptureStore.open(path)
    other = path.parent / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE somebodys (thing)")
    before = other.read_bytes()
    with pytest.raises(StoreError, match="is not a Polar capture file but another SQLite file"):
        CaptureStore.open(other)
    assert other.read_bytes() == before


def test_a_damaged_file_says_what_to_do(path: Path) -> None:
    asyncio.run(open_session(path))
    asyncio.run(commit(path, *(context(number, [number] * 1000) for number in range(100))))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    for opener in (CaptureStore, CaptureReader):
        with pytest.raises(StoreError, match=r"is damaged \(.*malformed\); restore it from a copy, or save what is readable"):
            opener.open(path)
    path.write_bytes(whole[:8192] + b"\xff" * (len(whole) - 8192))
    with pytest.raises(StoreError, match="is damaged"):
        CaptureReader.open(path).nodes("s1")


async def open_session(path: Path) -> None:
    store = CaptureStore.open(path)
    await store.open_session(session())
    await store.close()


def test_a_blob_that_cannot_be_decoded_is_damage(path: Path) -> None:
    asyncio.run(open_session(path))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE sessions SET body = x'00'")
    with pytest.raises(StoreError, match="is damaged"):
        CaptureReader.open(path).sessions()


@ROOT_ONLY
def test_a_file_at_rest_is_read_where_nothing_can_be_written(small_disk: Path, path: Path) -> None:
    asyncio.run(open_session(path))
    copy = Path(shutil.copy(path, small_disk))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert CaptureReader.open(copy).sessions() == [session()]
    with pytest.raises(StoreError, match="Read-only file system"):
        CaptureStore.open(copy)
