"""`polar export`: the traces of a run as a file for a trainer. Every format is written session by session."""

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import msgspec
import pyarrow.parquet as pq

from polar.cli.console import count, output, plain
from polar.cli.runs import Run
from polar.errors import StoreError, UsageError
from polar.specs import SOLVED, BuilderName, SessionResult, TrainingPolicy
from polar.store.capture import CaptureReader
from polar.store.captured import trained_forest, trajectory
from polar.trajectory.arrow import SCHEMA, table
from polar.trajectory.export import Exported, session_json
from polar.trajectory.forest import Forest
from polar.trajectory.sft import chats
from polar.trajectory.tensors import Columns, ForestTensors, TensorFile, TraceTensors

Format = Literal["json", "parquet", "safetensors", "forest", "sft"]
Item = TypeVar("Item")
ENDINGS: dict[Format, str] = {
    "json": "traces.jsonl",
    "parquet": "traces.parquet",
    "safetensors": "traces.safetensors",
    "forest": "forest.safetensors",
    "sft": "sft.jsonl",
}


@dataclass(frozen=True)
class Wanted:
    """What to write; `longest` and `min_reward` are for `sft`."""

    form: Format
    builder: BuilderName
    longest: bool
    min_reward: float | None
    policy: TrainingPolicy

    def __post_init__(self) -> None:
        for option, given in (("--longest", self.longest), ("--min-reward", self.min_reward is not None)):
            if given and self.form != "sft":
                raise UsageError(f"{option} is for --format sft, not for {self.form}")
        if self.form == "forest" and self.builder != "prefix_merging":
            raise UsageError("--format forest has what every call shares once; it takes no --builder")

    @property
    def least(self) -> float:
        """The reward below which a session is left out: what is imitated should be worth it, other trainers weigh by reward."""
        if self.form != "sft":
            return -math.inf
        return SOLVED if self.min_reward is None else self.min_reward


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

    def count_forests(self, forests: Iterable[Forest]) -> Iterator[Forest]:
        """Pass `forests` through; their traces are the paths to their leaves."""
        for one in forests:
            self.sessions += 1
            self.traces += len(set(one.traces.tolist()) - {-1})
            self.tokens += len(one.ids)
            self.trained += int(one.loss_mask.sum())
            yield one


def export_command(path: Path, wanted: Wanted, *, out: Path | None, only: str | None) -> None:
    """Write the file, and say what is in it, and how many sessions are not because of their reward."""
    run = Run.read(path)
    results = [result for result in run.results if only is None or result.status == only]
    rewards = [result.reward for result in results if result.reward is not None]
    scored = [result for result in results if result.reward is not None and result.reward >= wanted.least]
    left_out = f"{count(len(results) - len(rewards))} sessions without a reward left out"
    if not rewards:
        raise UsageError(f"{path} has no {only or 'finished'} sessions with a reward to export; {left_out}")
    if not scored:
        best = f"the best has {max(rewards):g}, which --min-reward {max(rewards):g} takes"
        raise UsageError(f"{path} has no session with a reward of at least {wanted.least:g} to export; {best}")
    if len(scored) < len(rewards):
        left_out = f"{count(len(rewards) - len(scored))} with a reward below {wanted.least:g}, {left_out}"
    target = out or path / ENDINGS[wanted.form]
    sums = _Sums()
    with closing(CaptureReader.open(run.folder.capture)) as reader, replacing(target) as file:
        _write(file, wanted, reader, scored, sums, lambda: _spool(target.parent))
    said = f"{count(sums.sessions)} sessions, {count(sums.traces)} traces, {count(sums.tokens)} tokens"
    trained = f"{count(sums.trained)} under the mask" + (f"; {left_out}" if len(scored) < len(results) else "")
    output().print(plain(f"{target}: {said}, {trained}"), soft_wrap=True)


def _write(
    file: BinaryIO,
    wanted: Wanted,
    reader: CaptureReader,
    results: Sequence[SessionResult],
    sums: _Sums,
    spool: Callable[[], BinaryIO],
) -> None:
    sessions = sums.count(Exported(result, trajectory(reader, result, wanted.builder, wanted.policy)) for result in results)
    match wanted.form:
        case "json":
            file.writelines(msgspec.json.encode(session_json(exported)) + b"\n" for exported in sessions)
        case "sft":
            lines = (chat for exported in sessions for chat in chats(exported, longest=wanted.longest))
            file.writelines(msgspec.json.encode(chat) + b"\n" for chat in lines)
        case "parquet":
            _write_table(file, sessions)
        case "safetensors":
            _write_tensors(file, TraceTensors(), sessions, spool)
        case "forest":
            forests = sums.count_forests(trained_forest(reader, result, wanted.policy) for result in results)
            _write_tensors(file, ForestTensors(), forests, spool)


def _spool(folder: Path) -> BinaryIO:
    """A file without a name, which whom it is for closes."""
    return tempfile.TemporaryFile(dir=folder)


def _write_table(file: BinaryIO, sessions: Iterable[Exported]) -> None:
    """A row group for each session."""
    with pq.ParquetWriter(file, SCHEMA) as writer:
        for exported in sessions:
            if exported.trajectory.traces:
                writer.write_table(table(exported))


def _write_tensors(file: BinaryIO, columns: Columns[Item], items: Iterable[Item], spool: Callable[[], BinaryIO]) -> None:
    tensors = TensorFile(columns, spool)
    for item in items:
        tensors.add(item)
    tensors.pour(file)


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
