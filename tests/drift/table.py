"""Holds the whole drift probe, and writes what was seen: `python -m tests.drift.table docs/drift.md [JUNIT_XML]`.

`JUNIT_XML` is the report of `tests/e2e/test_qwen3_vllm.py`; without one, the table of real harnesses stays as it is.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

from tests.drift.cells import CHATTED, TOKEN_IN, Cell, held
from tests.drift.probe import Outcome

DIALOGUES = 64
PROCESSES = 2
HEAD = ("renderer", "vocabulary", "dialect", "dialogues", "calls", "sampled tokens", "came back changed", "breaks", "traces")
HARNESSES = ("harness", "dialect", "first prompt", "turns", "sampled tokens", "no tokenizer would spell so", "breaks", "branches")


def token_in_table(outcomes: Mapping[Cell, Outcome]) -> str:
    """A row per cell, and their sum."""
    rows = [[cell.renderer, cell.vocabulary, f"`{cell.dialect}`", *_numbers(outcome)] for cell, outcome in outcomes.items()]
    return _table(HEAD, rows)


def chat_table(outcomes: Mapping[Cell, Outcome]) -> str:
    """A row per cell, with the reasons of its forks."""
    rows = [
        [
            cell.vocabulary,
            f"`{cell.dialect}`",
            "tokenizer's" if cell.canonical else "odd",
            *_numbers(outcome),
            _reasons(outcome.forks),
        ]
        for cell, outcome in outcomes.items()
    ]
    return _table((*HEAD[1:3], "samples", *HEAD[3:], "forks"), rows)


def harness_table(junit: Path) -> str:
    """A row per harness, as its test recorded it.

    Raises:
        SystemExit: a harness failed.
    """
    rows = []
    for case in ElementTree.parse(junit).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            raise SystemExit(f"{case.get('name')} failed: the table is not written")
        rows += [json.loads(each.get("value", "")) for each in case.iter("property") if each.get("name") == "row"]
    return _table(HARNESSES, [[f"`{name}`", f"`{dialect}`", *rest] for name, dialect, *rest in rows])


def replace(text: str, name: str, table: str) -> str:
    """`text` with `table` between the marks of that name."""
    start, end = f"<!-- {name}: make drift-table -->\n", f"<!-- /{name} -->\n"
    return text[: text.index(start) + len(start)] + table + text[text.index(end) :]


def _numbers(outcome: Outcome) -> list[object]:
    changed = sum(outcome.changes[name] for name in ("arguments_respelled", "reasoning_changed", "text_trimmed"))
    return [outcome.dialogues, outcome.calls, outcome.sampled, changed, outcome.breaks, outcome.traces]


def _reasons(forks: Mapping[str, int]) -> str:
    return ", ".join(f"`{name}` {count}" for name, count in sorted(forks.items(), key=lambda fork: (-fork[1], fork[0])))


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(_cell(value) for value in line) + " |\n" for line in lines)


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _hold(cells: Sequence[Cell], dialogues: int) -> dict[Cell, Outcome]:
    outcomes: dict[Cell, Outcome] = {}
    with ProcessPoolExecutor(PROCESSES) as pool:
        for cell, outcome in zip(cells, pool.map(held, cells, [dialogues] * len(cells)), strict=True):
            outcomes[cell] = outcome
            sys.stdout.write(f"{cell.name}: {outcome.breaks} breaks, {outcome.traces} traces\n")
            sys.stdout.flush()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.drift.table", description="Hold the drift probe.")
    parser.add_argument("document", type=Path)
    parser.add_argument("junit", type=Path, nargs="?")
    parser.add_argument("--dialogues", type=int, default=DIALOGUES, help="per row")
    args = parser.parse_args()
    began = time.monotonic()
    tables = {
        "token-in": token_in_table(_hold(TOKEN_IN, args.dialogues)),
        "chat": chat_table(_hold(CHATTED, args.dialogues)),
        **({"harnesses": harness_table(args.junit)} if args.junit else {}),
    }
    text = args.document.read_text()
    for name, table in tables.items():
        text = replace(text, name, table)
    args.document.write_text(text)
    sys.stdout.write(f"{args.document}: {time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
