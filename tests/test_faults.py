"""The table of faults says the truth: what it names is in the code, and in the tests."""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from polar.audit.faults import FAULTS
from polar.audit.faults.fault import Fault
from polar.audit.faults.table import written

ROOT = Path(__file__).parents[1]
IDS = [f"T{n:02}" for n in range(1, 19)] + [f"L{n:02}" for n in range(1, 6)]
IDS += [f"C{n:02}" for n in range(1, 13)] + [f"W{n:02}" for n in range(1, 5)]
SHOWN_AS = ("finding", "excluded", "fork", "unserved", "normaliser", "self-test", "status")
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)


def test_every_fault_is_there_once() -> None:
    assert [fault.id for fault in FAULTS] == IDS


@each_fault
def test_what_notices_it_is_in_the_code(fault: Fault) -> None:
    assert fault.detectors
    for name in fault.detectors:
        kind, _, value = name.partition(" ")
        if not value:
            assert found(name), name
        else:
            assert kind in SHOWN_AS, name
            assert value in literals(), f"nothing in src/polar says {value!r}"


@each_fault
def test_it_is_injected_by_tests_that_are_there(fault: Fault) -> None:
    assert fault.tests
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert name in names_in(ROOT / path), test


def test_the_document_has_the_table_as_it_is() -> None:
    text = (ROOT / "docs" / "faithfulness.md").read_text()
    assert written(text) == text, "python -m polar.audit.faults docs/faithfulness.md writes it"


def test_every_fault_that_the_code_names_is_one_of_them() -> None:
    named = {value for value in literals() if re.fullmatch(r"[TLCW]\d\d", value)}
    assert named <= set(IDS)


def found(name: str) -> bool:
    """Whether a dotted name can be imported."""
    parts = name.split(".")
    for size in range(len(parts) - 1, 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for part in parts[size:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@cache
def literals() -> frozenset[str]:
    """What the code says in so many words, the table apart."""
    sources = [path for path in (ROOT / "src" / "polar").rglob("*.py") if "faults" not in path.parts]
    nodes = (node for path in sources for node in ast.walk(ast.parse(path.read_bytes())))
    return frozenset(str(node.value) for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str | int))


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of the tests in a file, with their classes."""
    return frozenset(_tests(ast.parse(path.read_bytes()).body)) if path.is_file() else frozenset()


def _tests(body: list[ast.stmt], within: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _tests(node.body, f"{node.name}::")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield within + node.name
