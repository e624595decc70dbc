"""The tables that end a run, and that show one."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from polar.cli.console import count, plain
from polar.specs import Accounting, SessionResult, Timing

STAGES = ("preparing", "running", "scoring")
STATUS_STYLE = {"completed": "green", "timed_out": "yellow", "failed": "red", "cancelled": "magenta"}


def per_task(results: Sequence[SessionResult]) -> Table:
    """A row per task, and their sum; pass@1 says of how many sessions it is. Results of one task lie together."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("task", overflow="fold", min_width=8)
    for name in ("pass@1", "calls", "sampled", "trained"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("excluded", min_width=13)
    table.add_column("traces", justify="right", no_wrap=True)
    table.add_column("prep/run/\nscore, s", justify="right", no_wrap=True)
    for task_id, group in groupby(results, key=lambda result: result.task_id):
        table.add_row(plain(task_id), *_cells(list(group)))
    table.add_section()
    table.add_row("all", *_cells(results), style="bold")
    return table


def _cells(results: Sequence[SessionResult]) -> Iterator[str]:
    solved = [result.solved for result in results if result.reward is not None]
    accounting = total(results)
    yield (f"{sum(solved) / len(solved):.2f}" if solved else "–") + f" ({len(solved)})"
    yield count(sum(result.calls for result in results))
    yield count(accounting.sampled)
    yield count(accounting.trained)
    yield excluded(accounting, between="\n")
    yield count(sum(result.traces for result in results))
    yield "/".join(mean_seconds([result.timing for result in results], stage) for stage in STAGES)


def total(results: Iterable[SessionResult]) -> Accounting:
    """The accounting of all sessions together."""
    return sum((result.accounting for result in results), Accounting())


def excluded(accounting: Accounting, between: str = ", ") -> str:
    """Tokens that are not trained, by reason; "–" for none."""
    reasons = [f"{count(tokens)} {reason}" for reason, tokens in sorted(accounting.excluded.items()) if tokens]
    return between.join(reasons) or "–"


def mean_seconds(timings: Sequence[Timing], stage: str) -> str:
    """Mean time in a stage, over the sessions that came to it."""
    spent = [seconds for timing in timings if (seconds := getattr(timing, stage)) > 0]
    return f"{sum(spent) / len(spent):.1f}" if spent else "–"


def status(result: SessionResult) -> Text:
    """How a session ended, in colour."""
    return Text(result.status, STATUS_STYLE[result.status])
