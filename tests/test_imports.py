"""Data walks through the house in one direction: a room imports only from itself and from the rooms before it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "polar"

ROOMS = (
    "version errors ids recent chat paths specs dialects tokens trajectory store engines audit gateway sandboxes harnesses "
    "evaluators tasks rollout cluster training laptop integrations dashboard cli __main__"
).split()
PURE = {"errors", "ids", "recent", "chat", "specs", "dialects", "tokens", "trajectory"}
IO_MODULES = set(
    "aiohttp anyio asyncio concurrent fcntl glob http httpx logging mmap multiprocessing os pathlib requests select selectors "
    "shutil signal socket sqlite3 ssl starlette subprocess tempfile threading urllib uvicorn uvloop".split()
)
TORCH_MODULES = {"accelerate", "gguf", "peft", "torch", "transformers"}
TORCH_HOMES = ("polar.engines.embedded", "polar.training", "polar.laptop", "polar.integrations")
TRAINERS = {"ray", "tensordict", "trl", "verl"}
ONLY = f"only {' and '.join(TORCH_HOMES)} may import"


class Import(NamedTuple):
    line: int
    module: str


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module, without the package's own `__init__`, which only re-exports."""
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        if len(parts) > 1:
            yield ".".join(parts), path


def imports(tree: ast.AST, package: str) -> Iterator[Import]:
    """Every import, wherever it stands; `package` is what relative ones start from."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (Import(node.lineno, name.name) for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                start = ".".join([*base, *filter(None, [module])])
                yield from (Import(node.lineno, f"{start}.{name.name}") for name in names)
            case ast.Call(
                func=ast.Name(id="__import__") | ast.Attribute(attr="import_module"), args=[ast.Constant(str(name)), *_]
            ):
                yield Import(node.lineno, name)


def fault(importer: str, imported: str) -> str | None:
    """Why `importer` may not import `imported`, or None."""
    room, top = importer.split(".")[1], imported.split(".")[0]
    if top == "polar":
        target = [*imported.split("."), ""][1]
        if target not in ROOMS:
            return f"{imported} is in no room that tests/test_imports.py lists"
        if ROOMS.index(target) > ROOMS.index(room):
            return f"{room} comes before {target} and may not import it"
    if room in PURE and top in IO_MODULES:
        return f"{room} is pure and may not import {top}"
    if top in TORCH_MODULES and not importer.startswith(TORCH_HOMES):
        return f"{ONLY} {top}"
    if top in TRAINERS and room != "integrations":
        return f"only integrations may import {top}"
    return None


def opens_files(tree: ast.AST) -> Iterator[int]:
    """Lines that call the builtin `open`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            yield node.lineno


def violations(package: Path) -> list[str]:
    """Every break of the rules, as `file:line: why`."""
    found: list[str] = []
    for name, path in modules(package):
        room, tree, place = name.split(".")[1], ast.parse(path.read_bytes()), path.relative_to(package)
        if room not in ROOMS:
            found.append(f"{place}:1: {room} is no room that tests/test_imports.py lists")
            continue
        parent = name if path.name == "__init__.py" else name.rpartition(".")[0]
        faults = ((line, fault(name, imported)) for line, imported in imports(tree, parent))
        found += [f"{place}:{line}: {why}" for line, why in faults if why]
        if room in PURE:
            found += [f"{place}:{line}: {room} is pure and may not open files" for line in opens_files(tree)]
    return found


def test_the_house_keeps_its_direction() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("place", "source", "why"),
    [
        ("store/a.py", "import polar.gateway", "store comes before gateway and may not import it"),
        ("store/a.py", "from polar.gateway.server import x", "store comes before gateway and may not import it"),
        ("store/a.py", "from polar import gateway", "store comes before gateway and may not import it"),
        ("store/a.py", "from ..gateway import x", "store comes before gateway and may not import it"),
        ("store/__init__.py", "from ..gateway import x", "store comes before gateway and may not import it"),
        ("chat.py", "from .specs import x", "chat comes before specs and may not import it"),
        ("store/a.py", "def f():\n    from polar import cli", "store comes before cli and may not import it"),
        ("store/a.py", "import importlib\nimportlib.import_module('polar.cli')", "store comes before cli and may not import it"),
        ("store/a.py", "import polar.attic", "polar.attic is in no room that tests/test_imports.py lists"),
        ("attic.py", "", "attic is no room that tests/test_imports.py lists"),
        ("tokens/deep/a.py", "from pathlib import Path", "tokens is pure and may not import pathlib"),
        ("dialects/a.py", "import asyncio.subprocess", "dialects is pure and may not import asyncio"),
        ("specs.py", "open('x')", "specs is pure and may not open files"),
        ("gateway/a.py", "import torch.nn", f"{ONLY} torch"),
        ("training/a.py", "import polar.integrations.trl", "training comes before integrations and may not import it"),
        ("training/a.py", "from verl import DataProto", "only integrations may import verl"),
        (
            "engines/vllm.py",
            "from transformers import x",
            f"{ONLY} transformers",
        ),
    ],
)
def test_a_break_of_the_rules_is_found(tmp_path: Path, place: str, source: str, why: str) -> None:
    line = source.count("\n") + 1
    assert violations(house(tmp_path, place, source)) == [f"{place}:{line}: {why}"]


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("gateway/a.py", "from polar.store.b import x\nfrom polar.gateway import y\nfrom . import z\nimport asyncio"),
        ("store/__init__.py", "from .capture import x\nfrom ..specs import y"),
        ("engines/embedded/server.py", "import torch\nfrom transformers import x"),
        ("tokens/a.py", "import re\nimport numpy as np\nfrom polar import chat, ids"),
        ("__init__.py", "from polar.cli import x"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, place: str, source: str) -> None:
    assert violations(house(tmp_path, place, source)) == []


def test_the_core_imports_without_torch() -> None:
    names = [name for name, _ in modules(PACKAGE) if not name.startswith(TORCH_HOMES) and not name.endswith("__main__")]
    program = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({sorted(TORCH_MODULES)!r}))
for name in {["polar", *names]!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def house(tmp_path: Path, place: str, source: str) -> Path:
    """A package `polar` with one file."""
    path = tmp_path / "polar" / place
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return tmp_path / "polar"
