"""Numbers of a run, a line for each step, and wherever else they are wanted."""

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from polar.errors import UsageError
from polar.training.durable import write_durably

FILE = "metrics.jsonl"
Values = Mapping[str, float]


class Sink(Protocol):
    """Where numbers go besides the file."""

    def write(self, step: int, values: Values) -> None:
        """Take the numbers of a step."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class Metrics:
    """The numbers of one run: `metrics.jsonl` in its folder, and sinks by name."""

    def __init__(self, folder: Path, log: Sequence[str] = (), after: int = 0) -> None:
        """Go on with the file that is there.

        Args:
            after: the last step that counts; what was written of later ones is forgotten, for they are made again.

        Raises:
            UsageError: a sink's package is not installed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE
        self._sinks: list[Sink] = [_SINKS[name](folder, after) for name in log]
        if self._path.exists():
            kept = [msgspec.json.encode(line) + b"\n" for line in read(self._path) if line["step"] <= after]
            write_durably(self._path, b"".join(kept))

    def write(self, step: int, values: Values) -> None:
        """Write the numbers of a step; what is not finite becomes null."""
        known = {name: value if math.isfinite(value) else None for name, value in sorted(values.items())}
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode({"step": step, "time": time.time(), **known}) + b"\n")
        finite = {name: value for name, value in known.items() if value is not None}
        for sink in self._sinks:
            sink.write(step, finite)

    def close(self) -> None:
        """Have sinks write what they hold."""
        for sink in self._sinks:
            sink.close()


def read(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics file; a last one that was cut is left out, and so are values that are null.

    Raises:
        UsageError: there is no such file, or it holds something else.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as fault:
        raise UsageError(f"{path}: {fault.strerror}; expected the metrics of a training run") from None
    found: list[dict[str, float]] = []
    for number, line in enumerate(lines, start=1):
        try:
            values = msgspec.json.decode(line, type=dict[str, float | None]) if line else {}
        except msgspec.DecodeError as fault:
            if number == len(lines):
                break
            raise UsageError(f"{path}:{number}: expected a line of metrics: {fault}") from None
        if values:
            found.append({name: value for name, value in values.items() if value is not None})
    return found


class _TensorBoard:
    def __init__(self, folder: Path, after: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError("log = tensorboard needs a package that is not installed: pip install tensorboard") from None
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, folder: Path, after: int) -> None:
        try:
            import wandb
        except ImportError:
            raise UsageError("log = wandb needs a package that is not installed: pip install wandb") from None
        self._run = wandb.init(project="polar", name=folder.name, dir=str(folder), resume="allow", id=_wandb_id(folder))

    def write(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb_id(folder: Path) -> str:
    """The id of the folder's run, made up once: folders of one name are different runs, and a folder that is moved stays one."""
    path = folder / "train" / "wandb_id"
    if not path.exists():
        write_durably(path, secrets.token_hex(8).encode())
    return path.read_text()


class _MLflow:
    def __init__(self, folder: Path, after: int) -> None:
        try:
            import mlflow
        except ImportError:
            raise UsageError("log = mlflow needs a package that is not installed: pip install mlflow") from None
        self._mlflow = mlflow
        mlflow.start_run(run_name=folder.name)

    def write(self, step: int, values: Values) -> None:
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_SINKS: dict[str, Callable[[Path, int], Sink]] = {"tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow}
