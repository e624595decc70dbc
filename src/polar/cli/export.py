"""`polar export`: the traces of a run as a file for a trainer."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import pyarrow.parquet as pq

from polar.cli.console import count, output, plain
from polar.cli.runs import Run
from polar.errors import StoreError, UsageError
from polar.specs import BuilderName, SessionResult
from polar.store.capture import CaptureReader
from polar.store.captured import captured
from polar.trajectory.builders import build
from polar.trajectory.export import Exported, session_json, table, tensors

Format = Literal["json", "parquet", "safetensors"]
ENDINGS: dict[Format, str] = {"json": "jsonl", "parquet": "parquet", "safetensors": "safetensors"}


def export_command(path: Path, form: Format, *, out: Path | None, builder: BuilderName, only: str | None) -> None:
    """Write the file, and say what is in it."""
    run = Run.read(path)
    results = [result for result in run.results if only is None or result.status == only]
    if not results:
        raise UsageError(f"{path} has no {only or 'finished'} sessions to export")
    sessions = _sessions(run, results, builder)
    target = out or path / f"traces.{ENDINGS[form]}"
    with replacing(target) as file:
        _write(file, form, sessions)
    traces = [trace for exported in sessions for trace in exported.trajectory.traces]
    trained = sum(int(trace.loss_mask.sum()) for trace in traces)
    held = sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in traces)
    said = f"{count(len(sessions))} sessions, {count(len(traces))} traces, {count(held)} tokens, {count(trained)} under the mask"
    output().print(plain(f"{target}: {said}"), soft_wrap=True)


def _sessions(run: Run, results: Sequence[SessionResult], builder: BuilderName) -> list[Exported]:
    with closing(CaptureReader.open(run.folder.capture)) as reader:
        return [
            Exported(
                result,
                build(
                    captured(reader, result.session_id),
                    builder=builder,
                    status=result.status,
                    reward=result.reward,
                    findings=result.own_findings,
                ),
            )
            for result in results
        ]


def _write(file: BinaryIO, form: Format, sessions: Sequence[Exported]) -> None:
    match form:
        case "json":
            for exported in sessions:
                file.write(msgspec.json.encode(session_json(exported)) + b"\n")
        case "parquet":
            pq.write_table(table(sessions), file)
        case "safetensors":
            file.write(tensors(sessions))


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
