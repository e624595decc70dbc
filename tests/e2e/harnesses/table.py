"""What the tests of real harnesses showed, as a table: `python -m tests.e2e.harnesses.table JUNIT_XML docs/harnesses.md`.

A cell counts the tests that passed; one that failed is named as such, and "–" says that there is none.
"""

import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

START, END = "<!-- played: make harness-table -->\n", "<!-- /played -->\n"
# Column → what the names of its tests hold.
COLUMNS = {
    "loop, two at once": "one_call_and_two_at_once",
    "sub-agents": "sub_agent",
    "compaction": "compaction|compacted",
    "engine faults": "fault_of_the_engine|stream_that_br",
    "prompt too long": "not_fit|never_fits",
    "killed in mid-stream": "dies_in_mid_stream|dies_while",
    "gateway killed": "gateway_killed",
    "instruction is text": "instruction_is_text",
    "first prompts equal": "first_prompts_are_equal|system_prompt_is_that",
}


def table(junit: Path) -> str:
    """The rows, a harness each, in the order of their names."""
    passed: dict[str, Counter[str]] = {}
    failed: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        harness, column = _harness(case), _column(case.get("name", ""))
        if harness and column:
            bad = case.find("failure") is not None or case.find("error") is not None
            (failed if bad else passed).setdefault(harness, Counter())[column] += 1
    names = sorted(passed.keys() | failed.keys())
    rows = [
        f"| `{name}` | " + " | ".join(_cell(passed.get(name), failed.get(name), column) for column in COLUMNS) + " |"
        for name in names
    ]
    return "\n".join(["| harness | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|", *rows]) + "\n"


def _harness(case: ElementTree.Element) -> str:
    module = case.get("classname", "").rpartition(".")[2].removeprefix("test_")
    if module == "restart":
        found = re.search(r"\[(\w+)\]", case.get("name", ""))
        return found[1] if found else ""
    return "" if module in ("rig", "harnesses") else module


def _column(test: str) -> str:
    return next((column for column, pattern in COLUMNS.items() if re.search(pattern, test)), "")


def _cell(passed: Counter[str] | None, failed: Counter[str] | None, column: str) -> str:
    good, bad = (passed or Counter())[column], (failed or Counter())[column]
    return f"{good} passed, {bad} FAILED" if bad else f"{good} passed" if good else "–"


def main() -> None:
    junit, document = map(Path, sys.argv[1:])
    text = document.read_text()
    before, after = text[: text.index(START) + len(START)], text[text.index(END) :]
    document.write_text(before + table(junit) + after)


if __name__ == "__main__":
    main()
