"""What a task must satisfy beyond its types, wherever it comes from: a file, the command line, or Python."""

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

import msgspec

from polar.errors import UsageError
from polar.specs import Task

MAX_SAMPLES = 100_000
MAX_SECONDS = 30 * 24 * 3600
MAX_TOKENS = 2**31 - 1
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Problem(NamedTuple):
    """What is wrong with a field; `field` is its path from the task."""

    field: tuple[str, ...]
    message: str


def check(task: Task) -> None:
    """Refuse a task that cannot be run.

    Raises:
        UsageError: naming task, field, what was expected and what came.
    """
    for problem in problems(task):
        raise UsageError(f"task {task.id!r}: {'.'.join(problem.field)}: {problem.message}")


def problems(task: Task) -> Iterator[Problem]:
    """All that is wrong with the values of a task."""
    if not _ID.fullmatch(task.id):
        yield Problem(("id",), f"expected up to 128 letters, digits, '.', '_' and '-', not a sign first; got {task.id!r}")
    if not task.instruction.strip():
        yield Problem(("instruction",), "expected what the agent is told; it is empty")
    yield from _texts(task)
    yield from _numbers(task)
    if isinstance(task.workspace, dict):
        yield from _paths(("workspace",), task.workspace)
    yield from _paths(("evaluator", "files"), task.evaluator.files)


def _texts(task: Task) -> Iterator[Problem]:
    """What cannot be an argument of a program, or be written to a file."""
    for field, text in ((("instruction",), task.instruction), (("evaluator", "command"), task.evaluator.command)):
        if "\0" in text:
            yield Problem(field, "expected text without NUL characters")
    for name in Task.__struct_fields__:
        try:
            msgspec.json.encode(getattr(task, name))
        except UnicodeEncodeError as fault:
            yield Problem((name,), f"expected text that UTF-8 can hold: {fault.reason}")


def _numbers(task: Task) -> Iterator[Problem]:
    yield from _between(("samples",), task.samples, 1, MAX_SAMPLES)
    sampling, timeouts = task.sampling, task.timeouts
    yield from _between(("sampling", "temperature"), sampling.temperature, 0, 100)
    if not 0 < sampling.top_p <= 1:
        yield Problem(("sampling", "top_p"), f"expected more than 0 and at most 1, got {sampling.top_p}")
    yield from _between(("sampling", "top_k"), sampling.top_k, 0, MAX_TOKENS)
    if sampling.max_tokens is not None:
        yield from _between(("sampling", "max_tokens"), sampling.max_tokens, 1, MAX_TOKENS)
    for stage, seconds in (("prepare", timeouts.prepare), ("run", timeouts.run), ("score", timeouts.score)):
        if not 0 < seconds <= MAX_SECONDS:
            yield Problem(("timeouts", stage), f"expected seconds, more than 0 and at most {MAX_SECONDS}; got {seconds}")


def _between(field: tuple[str, ...], value: float, least: int, most: int) -> Iterator[Problem]:
    if not least <= value <= most:
        got = "a number far outside" if abs(value) > 1e20 else value
        yield Problem(field, f"expected {least} to {most}, got {got}")


def _paths(field: tuple[str, ...], names: Iterable[str]) -> Iterator[Problem]:
    for name in names:
        path = PurePosixPath(name)
        if not name or "\0" in name or path.is_absolute() or not path.parts or ".." in path.parts or name.endswith("/"):
            yield Problem((*field, name), f"expected the path of a file within the workspace, got {name!r}")
