"""What was seen of harnesses: as lines for a person, and as the rows of a document's table."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.text import Text

from polar.cli.console import count, plain, visible
from polar.errors import UsageError
from polar.rollout.check import FILES, Checked

START, END = "<!-- checked: polar harness check --all --write FILE -->", "<!-- /checked -->"
COLUMNS = (
    *("harness", "version", "installed", "API", "streams", "calls", "first prompt, tokens", "s", "files", "traces", "breaks"),
    *("kinds", "tool-call ids back", "other ids back", "not served", "unknown routes", "verdict"),
)
NONE = "–"


def lines(checked: Checked) -> Iterator[Text]:
    """A harness in a few lines, the verdict first."""
    yield plain(f"{_title(checked)}: {checked.verdict}", "green" if checked.ok else "red")
    if checked.calls:
        api = f"{', '.join(checked.dialects)}, streamed: {checked.streamed}"
        calls = f"calls: {_counts(checked.kinds)}, the first of {count(checked.prompt_tokens)} tokens, in {checked.seconds:.1f} s"
        yield plain(f"  {api} · {calls}" + (f" · {checked.size} installed" if checked.size else ""))
        back = f"tool-call ids back: {_of(*checked.tool_ids)}, other ids: {checked.other_ids}"
        breaks = f"traces: {checked.traces}, breaks: {_counts(checked.breaks)}"
        yield plain(f"  files: {_of(checked.files, len(FILES))} · {breaks} · {back}")
        yield plain(f"  not served: {_names(checked.unserved)} · unknown routes: {_names(checked.unknown_routes, '; ')}")
    if checked.run:
        yield plain(f"  what happened: polar show {checked.run}", "bold")


def table(checked: Sequence[Checked]) -> str:
    """A Markdown table with a row per harness."""
    return "\n".join([*_head(), *map(_row, checked)])


def with_rows(path: Path, checked: Sequence[Checked]) -> str:
    """The text of a document, its table holding the rows of `checked`; rows of other harnesses stay as they are.

    Raises:
        UsageError: the document cannot be read, or does not mark where the table is.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise UsageError(f"--write {path}: {error.strerror}") from None
    before, start, rest = text.partition(START)
    inside, end, after = rest.partition(END)
    if not (start and end):
        raise UsageError(f"--write {path}: expected a line {START!r} and below it a line {END!r}, between which the table goes")
    rows = {_name(line): line for line in inside.splitlines() if line.startswith("| `")}
    rows |= {_name(row): row for row in map(_row, checked)}
    return "\n".join([before + START, *_head(), *rows.values(), END + after])


def _name(row: str) -> str:
    return row.split("`")[1]


def _head() -> tuple[str, str]:
    return f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"


def _row(checked: Checked) -> str:
    cells = (
        f"`{checked.harness}`",
        checked.version or NONE,
        checked.size or NONE,
        _names(checked.dialects),
        checked.streamed or NONE,
        count(checked.calls),
        count(checked.prompt_tokens),
        f"{checked.seconds:.1f}",
        _of(checked.files, len(FILES)),
        count(checked.traces),
        _counts(checked.breaks),
        _counts(checked.kinds),
        _of(*checked.tool_ids),
        count(checked.other_ids),
        _names(checked.unserved),
        _names(checked.unknown_routes, "; "),
        checked.verdict,
    )
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Text that stays in its cell, and is no markup."""
    return re.sub(r"[|<>]", lambda found: f"&#{ord(found[0])};", visible(" ".join(text.split())))


def _title(checked: Checked) -> str:
    return f"{checked.harness} {checked.version}".strip()


def _of(some: int, every: int) -> str:
    return f"{some} of {every}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items()) or NONE


def _names(names: Sequence[str], between: str = ", ") -> str:
    return between.join(names) or NONE
