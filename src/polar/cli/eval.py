"""`polar eval`: pass rates with intervals, by harness."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from polar.cli.console import count, log_warnings, output, plain
from polar.cli.interrupt import Stopped, drive
from polar.cli.progress import Progress
from polar.cli.runs import Run
from polar.engines.embedded.models import SMOLLM2, resolve
from polar.errors import UsageError
from polar.rollout.connect import EMBEDDED, EngineOptions
from polar.rollout.folder import RunFolder
from polar.rollout.runner import RunOptions, RunSummary, SandboxChoice, run_tasks
from polar.specs import Task
from polar.tasks.files import Overrides, load
from polar.training.evaluation import Evaluation, check_alike, evaluation, gain, read, write
from polar.training.intervals import Interval


def eval_command(
    sources: Sequence[str],
    *,
    harnesses: Sequence[str],
    samples: int | None,
    serving: EngineOptions,
    concurrency: int,
    sandbox: SandboxChoice,
    out: Path,
    against: Path | None,
) -> int:
    """Run, sum up and compare; the exit status."""
    console = output()
    log_warnings()
    before = read(against) if against else {}
    if missing := [name for name in harnesses if against and name not in before]:
        raise UsageError(f"--against {against}: it has no evaluation of {', '.join(missing)}")
    planned = {harness: load(sources, Overrides(harness, samples)) for harness in harnesses}
    for harness, earlier in before.items():
        if harness in planned:
            check_alike(earlier, planned[harness])
    found: dict[str, Evaluation] = {}
    for harness, tasks in planned.items():
        options = RunOptions(
            out / harness,
            serving.engine,
            serving.model,
            sandbox,
            concurrency,
            serving.renderer,
            serving.routes,
            serving.accept_unproven,
        )
        _check_model(options)
        try:
            summary = _run(tasks, options, Progress(console))
        except Stopped as stopped:
            console.print(plain("stopped; nothing is lost: the same command goes on where this stopped", "yellow"))
            return stopped.status
        found[harness] = evaluation(harness, serving.model or serving.engine, tasks, summary.results)
        write(out, found)
    _report(console, found, before)
    return 1 if any(each.without for each in found.values()) else 0


def _check_model(options: RunOptions) -> None:
    """Sessions that are there already must be of the model that is asked for: if all are, no engine starts that could tell.

    Raises:
        UsageError: they are another model's.
    """
    if options.engine != EMBEDDED or not RunFolder(options.out).ledger.is_file():
        return
    before = Run.read(options.out).meta.get("model_path")
    if before and before != str(resolve(options.model or SMOLLM2)):
        raise UsageError(f"{options.out} holds sessions of the model in {before}: evaluate another one with another --out")


def _run(tasks: Sequence[Task], options: RunOptions, progress: Progress) -> RunSummary:
    async def work() -> RunSummary:
        async with progress.told():
            return await run_tasks(tasks, options, progress)

    with progress.shown():
        return drive(work(), lambda: progress.note("stopping; Ctrl-C again stops at once"))


def _report(console: Console, found: dict[str, Evaluation], before: dict[str, Evaluation]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    names = ["harness", "sessions", "pass@1 (95 %)", *(["before", "gain (95 %)"] if before else [])]
    fewest = min(min(map(len, each.rewards.values())) for each in found.values())
    names += [f"pass@{fewest}"] if fewest > 1 else []
    for name in [*names, "reward", "no reward", "calls", "tokens", "s/session"]:
        table.add_column(name, justify="left" if name == "harness" else "right")
    for harness, each in found.items():
        cells = [harness, count(each.sessions), _percent(each.pass_at_1)]
        if before:
            earlier = before[harness]
            cells += [f"{earlier.pass_at_1.value:.1%}", "–" if each.without else _percent(gain(earlier, each), signed=True)]
        cells += [f"{each.at_k(fewest):.1%}"] if fewest > 1 else []
        cells += [f"{each.reward:.3f}", count(each.without), f"{each.calls:.1f}", count(each.tokens), f"{each.seconds:.1f}"]
        table.add_row(*cells)
    console.print(table)
    if lost := sum(each.without for each in found.values()):
        console.print(f"{lost} sessions have no reward and count neither way; the same command retries them", style="red")


def _percent(interval: Interval, *, signed: bool = False) -> str:
    form = "+.1f" if signed else ".1f"
    value, low, high = (format(100 * each, form) for each in interval)
    return f"{value} [{low}, {high}]"
