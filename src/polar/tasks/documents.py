"""Task files read to plain values that know where they stand.

Whatever a file holds, reading it takes memory in proportion to its size, and what is wrong is said with file and line.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from polar.errors import UsageError

Values = dict[str, object]
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_DEPTH = 64
MAX_ALIASED = 16_000_000  # letters that aliases may add to a file
TOP_FIELDS = {"defaults", "tasks"}


@dataclass(frozen=True)
class RawTask:
    """One task as written, defaults merged under it.

    Attributes:
        nodes: where its fields stand, to be asked for lines; the task itself first, then the defaults. Empty in JSONL.
    """

    values: Values
    path: Path
    line: int
    nodes: tuple[yaml.Node, ...] = ()

    def line_of(self, field: Sequence[str]) -> int:
        """The line of a field, or of the innermost known thing around it."""
        for depth in range(len(field), 0, -1):
            for node in self.nodes:
                if found := _find(node, field[:depth]):
                    return _line(found)
        return self.line


def read_yaml(path: Path) -> list[RawTask]:
    """The tasks of a YAML file: a list of tasks, or a mapping with `tasks` and `defaults`.

    Raises:
        UsageError: with file and line.
    """
    loader = Loader(_text(path))
    try:
        root = loader.get_single_node()
        if root is None:
            _fail(path, None, "the file is empty; expected a list of tasks")
        _Surveyor(path).survey(root)
        document = loader.construct_document(root)
    except yaml.MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        _fail(path, mark.line + 1 if mark else None, f"this is not YAML: {fault.problem or fault.context}")
    except (yaml.YAMLError, ValueError) as fault:
        _fail(path, None, f"this is not YAML: {str(fault).splitlines()[0]}")
    except RecursionError:
        _fail(path, None, f"nested too deeply; expected at most {MAX_DEPTH} levels")
    finally:
        loader.dispose()
    return _tasks(path, root, document)


def read_jsonl(path: Path) -> list[RawTask]:
    """The tasks of a JSONL file, one object per line; empty lines are skipped.

    Raises:
        UsageError: with file and line.
    """
    lines = [(number, line) for number, line in enumerate(_text(path).split("\n"), start=1) if line.strip()]
    if not lines:
        _fail(path, None, "the file is empty; expected a task as a JSON object on each line")
    return [RawTask(_json_object(path, number, line), path, number) for number, line in lines]


def merge(defaults: Values, values: Values) -> Values:
    """`values` over `defaults`; mappings are merged key by key, anything else is replaced."""
    merged = dict(defaults)
    for key, value in values.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def kind_of(value: object) -> str:
    """What a value is, in the words of YAML and JSON."""
    names = {
        "dict": "a mapping",
        "list": "a list",
        "str": "text",
        "NoneType": "nothing",
        "bool": "true or false",
        "int": "a number",
    }
    return names.get(type(value).__name__, "a number" if isinstance(value, float) else f"a {type(value).__name__}")


def _text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        line = content.count(b"\n", 0, fault.start) + 1
        _fail(path, line, f"this is not UTF-8: byte 0x{content[fault.start]:02x} at offset {fault.start}")


def _tasks(path: Path, root: yaml.Node, document: object) -> list[RawTask]:
    """Pair each task with its node, and lay the defaults under it."""
    defaults: object = {}
    tasks, tasks_node, default_nodes = document, root, []
    if isinstance(document, dict):
        if "tasks" not in document or not document.keys() <= TOP_FIELDS:
            found = ", ".join(str(key) for key in document)
            _fail(
                path,
                _line(root),
                f"expected a list of tasks, or a mapping with `tasks` and `defaults`; got a mapping with {found}",
            )
        defaults, tasks = document.get("defaults") or {}, document["tasks"]
        tasks_node = _find(root, ["tasks"]) or root
        default_nodes = [node for node in [_find(root, ["defaults"])] if node]
    if not isinstance(defaults, dict):
        _fail(path, _line(default_nodes[0]), f"defaults: expected a mapping, got {kind_of(defaults)}")
    if not isinstance(tasks, list) or not isinstance(tasks_node, yaml.SequenceNode):
        _fail(path, _line(tasks_node), f"expected a list of tasks, got {kind_of(tasks)}")
    if not tasks:
        _fail(path, _line(tasks_node), "the list of tasks is empty")
    raw: list[RawTask] = []
    for values, node in zip(tasks, tasks_node.value, strict=True):
        if not isinstance(values, dict):
            _fail(path, _line(node), f"expected a task as a mapping, got {kind_of(values)}")
        raw.append(RawTask(merge(defaults, values), path, _line(node), (node, *default_nodes)))
    return raw


def _json_object(path: Path, number: int, line: str) -> Values:
    try:
        value = json.loads(line, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as fault:
        _fail(path, number, f"this is not JSON: {fault.msg} at column {fault.colno}")
    except RecursionError:
        _fail(path, number, "nested too deeply")
    except ValueError as fault:
        _fail(path, number, f"this is not JSON: {fault}")
    if not isinstance(value, dict):
        _fail(path, number, f"expected a task as a JSON object, got {kind_of(value)}")
    return value


def _unique(pairs: Iterable[tuple[str, object]]) -> Values:
    values: Values = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key!r} appears twice")
        values[key] = value
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class _Surveyor:
    """Refuses what would grow without bound once aliases are followed, and keys that appear twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._measured: dict[int, tuple[int, int]] = {}
        self._open: set[int] = set()
        self._written = 0

    def survey(self, root: yaml.Node) -> None:
        size, _ = self._measure(root, 0)
        if size - self._written > MAX_ALIASED:
            _fail(self._path, None, f"its aliases unfold to {size:,} letters, far more than is written; write the values out")

    def _measure(self, node: yaml.Node, depth: int) -> tuple[int, int]:
        """(letters, levels) of a node with its aliases unfolded; each node is visited once."""
        if known := self._measured.get(id(node)):
            return known
        if id(node) in self._open:
            _fail(self._path, _line(node), "this value contains itself through an alias")
        self._open.add(id(node))
        own = 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
        inner = [self._measure(child, depth + 1) for child in self._children(node)] if depth < MAX_DEPTH else []
        size, levels = own + sum(size for size, _ in inner), 1 + max((levels for _, levels in inner), default=0)
        if depth + levels > MAX_DEPTH:
            _fail(self._path, _line(node), f"nested too deeply; expected at most {MAX_DEPTH} levels")
        self._open.remove(id(node))
        self._written += own
        self._measured[id(node)] = size, levels
        return size, levels

    def _children(self, node: yaml.Node) -> list[yaml.Node]:
        if isinstance(node, yaml.SequenceNode):
            return list(node.value)
        if not isinstance(node, yaml.MappingNode):
            return []
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    _fail(self._path, _line(key), f"the key {key.value!r} appears twice")
                seen.add((key.tag, key.value))
        return [part for pair in node.value for part in pair]


def _find(node: yaml.Node, field: Sequence[str]) -> yaml.Node | None:
    """The value at `field`. The last of equal keys counts: those merged by `<<` come first."""
    for name in field:
        if not isinstance(node, yaml.MappingNode):
            return None
        found = [value for key, value in node.value if key.value == name]
        if not found:
            return None
        node = found[-1]
    return node


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _fail(path: Path, line: int | None, why: str) -> NoReturn:
    raise UsageError(f"{path}:{line}: {why}" if line else f"{path}: {why}")
