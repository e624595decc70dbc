"""`polar export`: the traces of a run as a file for a trainer."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import pyarrow.parquet as pq

from polar.cli.console import count, output, plain
from polar.cli.runs import Run
from polar.errors import StoreError, UsageError
from polar.specs import BuilderName, SessionResult
from polar.store.capture import CaptureReader
from polar.store.captured import trajectory
from polar.trajectory.arrow import table
from polar.trajectory.export import Exported, session_json, tensors

Format = Literal["json", "parquet", "safetensors"]
ENDINGS: dict[Format, str] = {"json": "jsonl", "parquet": "parquet", "safetensors": "safetensors"}


@dataclass
class _Sums:
    """What has been written so far."""

    sessions: int = 0
    traces: int = 0
    tokens: int = 0
    trained: int = 0

    def count(self, sessions: Iterable[Exported]) -> Iterator[Exported]:
        """Pass `sessions` through."""
        for exported in sessions:
            self.sessions += 1
            self.traces += len(exported.trajectory.traces)
            for trace in exported.trajectory.traces:
                self.tokens += len(trace.prompt_ids) + len(trace.response_ids)
                self.trained += int(trace.loss_mask.sum())
            yield exported


def export_command(path: Path, form: Format, *, out: Path | None, builder: BuilderName, only: str | None) -> None:
    """Write the file, and say what is in it, and how many sessions are not because they have no reward."""
    run = Run.read(path)
    results = [result for result in run.results if only is None or result.status == only]
    scored = [result for result in results if result.reward is not None]
    left_out = f"{count(len(results) - len(scored))} sessions without a reward left out"
    if not scored:
        raise UsageError(f"{path} has no {only or 'finished'} sessions with a reward to export; {left_out}")
    target = out or path / f"traces.{ENDINGS[form]}"
    sums = _Sums()
    with closing(CaptureReader.open(run.folder.capture)) as reader, replacing(target) as file:
        _write(file, form, sums.count(_sessions(reader, scored, builder)))
    said = f"{count(sums.sessions)} sessions, {count(sums.traces)} traces, {count(sums.tokens)} tokens"
    trained = f"{count(sums.trained)} under the mask" + (f"; {left_out}" if len(scored) < len(results) else "")
    output().print(plain(f"{target}: {said}, {trained}"), soft_wrap=True)


def _sessions(reader: CaptureReader, results: Sequence[SessionResult], builder: BuilderName) -> Iterator[Exported]:
    return (Exported(result, trajectory(reader, result, builder)) for result in results)


def _write(file: BinaryIO, form: Format, sessions: Iterable[Exported]) -> None:
    """JSON is written session by session; the others hold a whole run in memory."""
    match form:
        case "json":
            for exported in sessions:
                file.write(msgspec.json.encode(session_json(exported)) + b"\n")
        case "parquet":
            pq.write_table(table(list(sessions)), file)
        case "safetensors":
            file.write(tensors(list(sessions)))


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `target` once it is whole and on disk; if anything fails, `target` stays as it was.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror}; its directory must exist and have space") from error
