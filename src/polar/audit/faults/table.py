"""The faults as a table in a document, between two marks."""

from polar.audit.faults import FAULTS
from polar.audit.faults.fault import Fault

START, END = "<!-- faults: python -m polar.audit.faults docs/faithfulness.md -->\n", "<!-- /faults -->\n"
COLUMNS = ("id", "fault", "noticed by", "what Polar does", "tests")


def table() -> str:
    """The faults in Markdown, a row each."""
    head = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    return head + "".join(map(_row, FAULTS))


def _row(fault: Fault) -> str:
    detectors = ", ".join(f"`{name.removeprefix('polar.')}`" for name in fault.detectors)
    tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in fault.tests)
    return f"| {fault.id} | {fault.says} | {detectors} | {fault.handling} | {tests} |\n"


def written(text: str) -> str:
    """A document with the table in its place. ValueError if it does not say where that is."""
    before, after = text[: text.index(START) + len(START)], text[text.index(END) :]
    return before + table() + after
