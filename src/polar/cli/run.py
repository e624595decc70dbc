"""`polar run`: tasks in, scored sessions out."""

import shlex
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console

from polar.cli.console import count, log_warnings, output, plain
from polar.cli.errors import FAILED
from polar.cli.interrupt import Stopped, drive
from polar.cli.progress import Progress
from polar.cli.runs import RUNS
from polar.cli.tables import per_task
from polar.errors import InfrastructureError
from polar.rollout.connect import EngineOptions
from polar.rollout.folder import RunFolder
from polar.rollout.runner import RunOptions, RunSummary, SandboxChoice, run_tasks
from polar.specs import SessionResult, Task
from polar.tasks.files import Overrides, load

NAMED_FAILURES = 10  # more are only counted
NOTHING_LOST = "nothing is lost: the same command goes on where this stopped"


def run_command(
    sources: Sequence[str],
    *,
    harness: str | None,
    samples: int | None,
    serving: EngineOptions,
    concurrency: int,
    sandbox: SandboxChoice,
    out: Path | None,
    require_spread: bool,
) -> int:
    """Run, and say how it went; the exit status."""
    console = output()
    log_warnings()
    tasks = load(sources, Overrides(harness, samples))
    options = RunOptions(
        out or RUNS / Path(sources[0]).resolve().stem,
        serving.engine,
        serving.model,
        sandbox,
        concurrency,
        serving.renderer,
        serving.routes,
        serving.accept_unproven,
    )
    progress = Progress(console)
    try:
        with progress.shown():
            summary = drive(_run(tasks, options, progress), lambda: progress.note("stopping; Ctrl-C again stops at once"))
    except Stopped as stopped:
        console.print(plain(f"stopped; {NOTHING_LOST}", "yellow"), soft_wrap=True)
        return stopped.status
    except InfrastructureError:
        if RunFolder(options.out).ledger.is_file():
            progress.note(progress.line)
            progress.note(f"the run in {options.out} ended early; {NOTHING_LOST}")
        raise
    return _report(console, summary, require_spread)


async def _run(tasks: Sequence[Task], options: RunOptions, progress: Progress) -> RunSummary:
    async with progress.told():
        return await run_tasks(tasks, options, progress)


def _report(console: Console, summary: RunSummary, require_spread: bool) -> int:
    results = summary.results
    console.print(per_task(results))
    kinds = sorted({result.sandbox for result in results if result.sandbox})
    console.print(f"sandbox: {', '.join(kinds) or 'none'} · {count(len(results))} sessions · {_spread(results)}", style="dim")
    failed = [result for result in results if result.reward is None]
    _report_failures(console, failed)
    _report_next(console, summary)
    if require_spread and not _varying(results):
        console.print(
            "--require-spread: in no task did the rewards of its samples differ, so there is nothing to learn", style="red"
        )
        return FAILED
    return FAILED if failed else 0


def _varying(results: Sequence[SessionResult]) -> int:
    """Tasks whose samples got different rewards."""
    groups = [list(group) for _, group in groupby(results, key=lambda result: result.task_id)]
    return sum(len({result.reward for result in group if result.reward is not None}) > 1 for group in groups)


def _spread(results: Sequence[SessionResult]) -> str:
    tasks = len({result.task_id for result in results})
    return f"rewards vary within {_varying(results)} of {tasks} tasks"


def _report_failures(console: Console, failed: Sequence[SessionResult]) -> None:
    if not failed:
        return
    console.print(f"\n{len(failed)} sessions have no reward; the same command retries them:", style="red")
    for result in failed[:NAMED_FAILURES]:
        reason = f"{result.error_kind}: {result.error}" if result.error_kind else result.error
        console.print(plain(f"  {result.session_id} {result.task_id}#{result.sample} {reason}"), soft_wrap=True)
    if len(failed) > NAMED_FAILURES:
        console.print(f"  … and {len(failed) - NAMED_FAILURES} more")


def _report_next(console: Console, summary: RunSummary) -> None:
    run = shlex.quote(str(summary.out))
    commands = [f"polar show {run}", f"polar audit {run}", f"polar export {run} --format parquet"]
    if summary.results:
        commands.insert(1, f"polar show {run}/{summary.results[0].session_id}")
    console.print("\nnext:")
    for command in commands:
        console.print(plain(f"  {command}", "bold"), soft_wrap=True)
