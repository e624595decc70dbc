"""From what a file says to a typed task. What does not fit is named: file, line, task, field, what was expected, what came."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import NoReturn, get_origin

import msgspec
from msgspec import Struct, structs

from polar.errors import UsageError
from polar.specs import Task
from polar.tasks.checks import problems
from polar.tasks.documents import RawTask, kind_of

Field = tuple[str, ...]
_CONVERT_FAULT = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_TYPES = {
    "float": "a number",
    "int": "a whole number",
    "int | null": "a whole number",
    "object": "a mapping",
    "str": "text",
    "str | object": "a path or a mapping",
}


def decode(raw: RawTask) -> Task:
    """The task that `raw` describes, its workspace's path made absolute.

    Raises:
        UsageError: with file, line, task and field.
    """
    for field, message in _unknown_fields(raw.values, Task, ()):
        fail(raw, field, message)
    try:
        task = msgspec.convert(raw.values, Task, strict=True)
    except msgspec.ValidationError as fault:
        fail(raw, *_explain(str(fault), raw.values))
    for field, message in problems(task):
        fail(raw, field, message)
    return _with_workspace(task, raw)


def _unknown_fields(values: Mapping[str, object], kind: type[Struct], at: Field) -> Iterator[tuple[Field, str]]:
    known = {field.name: field.type for field in structs.fields(kind)}
    for name, value in values.items():
        if name not in known:
            hint = did_you_mean(str(name), known) or f"; expected one of {', '.join(known)}"
            yield (*at, str(name)), f"there is no such field{hint}"
        elif isinstance(value, dict) and _is_struct(known[name]):
            yield from _unknown_fields(value, known[name], (*at, name))


def _is_struct(kind: object) -> bool:
    return get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, Struct)


def _explain(fault: str, values: Mapping[str, object]) -> tuple[Field, str]:
    """(field, message) of a fault in msgspec's words."""
    match = _CONVERT_FAULT.fullmatch(fault)
    assert match is not None  # the pattern takes any text
    what, path = match["what"], match["path"] or ""
    if missing := re.search(r"missing required field `(.*)`", what):
        return (*path.split(".")[1:], missing[1]), "this field is required"
    field, value = _follow(values, path, by_key=bool(match["key"]))
    expected = re.match(r"Expected `(.*?)`", what)
    if expected is None:
        return field, what[:1].lower() + what[1:]
    wanted = _TYPES.get(expected[1], expected[1])
    quote = " (put it in quotes)" if wanted == "text" and not isinstance(value, dict | list | str | None) else ""
    return field, f"expected {wanted}, got {_show(value)}{quote}"


def _follow(values: Mapping[str, object], path: str, *, by_key: bool) -> tuple[Field, object]:
    """(field, value) at a path such as `.evaluator.files[...]`; which entry `[...]` means, its types tell."""
    value: object = values
    field: list[str] = []
    for step in re.findall(r"[^.\[\]]+|\.\.\.", path):
        assert isinstance(value, dict)
        key = step if step != "..." else next(key for key, entry in value.items() if not isinstance(entry, str))
        field.append(str(key))
        value = value[key]
    if by_key and isinstance(value, dict):
        value = next(key for key in value if not isinstance(key, str))
        field.append(str(value))
    return tuple(field), value


def _show(value: object) -> str:
    if value is None or isinstance(value, dict | list):
        return kind_of(value)
    text = repr(value) if isinstance(value, str | int | float) else str(value)
    return f"{kind_of(value)}: {text if len(text) <= 40 else text[:40] + '…'}"


def _with_workspace(task: Task, raw: RawTask) -> Task:
    """A workspace given as a path starts from the task's file, and must be there."""
    if isinstance(task.workspace, dict):
        return task
    try:
        path = (raw.path.parent / task.workspace).resolve()
        is_there = bool(task.workspace) and path.is_dir()
    except (OSError, ValueError, RuntimeError) as fault:
        fail(raw, ("workspace",), f"expected a directory, got {task.workspace!r}: {fault}")
    if not is_there:
        fail(raw, ("workspace",), f"expected a directory, got {task.workspace!r}, which is {path} from the task's file")
    return structs.replace(task, workspace=str(path))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at what was meant, or nothing."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close and close[0] != name else ""


def fail(raw: RawTask, field: Sequence[str], message: str) -> NoReturn:
    """Refuse a field of a task."""
    named = raw.values.get("id")
    task = f"task {named!r}: " if isinstance(named, str) and tuple(field) != ("id",) else ""
    raise UsageError(f"{raw.path}:{raw.line_of(field)}: {task}{'.'.join(field)}: {message}")
