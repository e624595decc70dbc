"""Sources of tasks: YAML and JSONL files, directories of them, and the tasks that come with Polar.

The registries of harnesses and evaluators are not asked here; whoever runs the tasks does that before the first session.
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from msgspec import Struct, structs

from polar.errors import UsageError
from polar.specs import HarnessSpec, Task
from polar.tasks.checks import check
from polar.tasks.decoding import decode, did_you_mean, fail
from polar.tasks.documents import RawTask, read_jsonl, read_yaml
from polar.tasks.workspace import PREFIX, workspace_tasks

READERS = {".yaml": read_yaml, ".yml": read_yaml, ".jsonl": read_jsonl}
EXPECTED = "a YAML file (.yaml, .yml), a JSONL file (.jsonl), a directory of such files, `demo`, or workspace:train:NUMBER"


class Overrides(Struct, frozen=True):
    """What the command line says of all tasks; None leaves them as they are.

    Attributes:
        harness: runs every task; a task that named another harness loses that one's options.
        samples: sessions per task.
    """

    harness: str | None = None
    samples: int | None = None


NO_OVERRIDES = Overrides()


def load(sources: Sequence[str], overrides: Overrides = NO_OVERRIDES) -> list[Task]:
    """The tasks of all sources, in order.

    Args:
        sources: YAML or JSONL files, directories of them, or `demo`.

    Raises:
        UsageError: naming file, line, task and field, what was expected and what came.
    """
    tasks: list[Task] = []
    places: dict[str, RawTask] = {}
    made = {source: workspace_tasks(source) for source in sources if source.startswith(PREFIX)}
    tasks += [_override(task, overrides) for source in made for task in made[source]]
    for raw in (raw for source in sources if source not in made for raw in _raw_tasks(source)):
        task = decode(raw)
        if first := places.get(task.id):
            fail(raw, ("id",), f"{task.id!r} is already at {first.path}:{first.line_of(['id'])}; ids are unique in a run")
        places[task.id] = raw
        tasks.append(_override(task, overrides))
    if not tasks:
        raise UsageError(f"no tasks: expected {EXPECTED}")
    return tasks


def _raw_tasks(source: str) -> list[RawTask]:
    try:
        return [task for path in _files(source) for task in READERS[path.suffix](path)]
    except OSError as fault:
        raise UsageError(f"{fault.filename or source}: it cannot be read: {fault.strerror}") from fault


def _files(source: str) -> list[Path]:
    """The files that a source names."""
    if source == "demo":
        return [Path(str(files("polar.tasks") / "demo.yaml"))]
    path = Path(source)
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in READERS and file.is_file())
        if not found:
            raise UsageError(f"{path}: this directory holds no task files; expected {EXPECTED}")
        return found
    if not path.is_file():
        nature = "this is no ordinary file" if path.exists() else "there is no such file"
        raise UsageError(f"{path}: {nature}{did_you_mean(path.name, _siblings(path))}; expected {EXPECTED}")
    if path.suffix not in READERS:
        raise UsageError(f"{path}: the name ends in none of {', '.join(READERS)}; expected {EXPECTED}")
    return [path]


def _siblings(path: Path) -> list[str]:
    try:
        return ["demo", *(file.name for file in path.parent.iterdir() if file.suffix in READERS)]
    except OSError:
        return ["demo"]


def _override(task: Task, overrides: Overrides) -> Task:
    if overrides.harness not in (None, task.harness.name):
        task = structs.replace(task, harness=HarnessSpec(overrides.harness))
    if overrides.samples is not None:
        task = structs.replace(task, samples=overrides.samples)
    check(task)
    return task
