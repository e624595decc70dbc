"""`polar audit`: prints the proof of a run, or what breaks it."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polar.audit.claims import CLAIMS
from polar.audit.rescore import APPROXIMATE, EXACT, POSITION_EDGES, Delta, Rescoring, rescore
from polar.audit.run import RunAudit, audit_run
from polar.cli.console import count, output, plain
from polar.cli.errors import FAILED
from polar.cli.interrupt import Stopped, drive
from polar.cli.runs import Run
from polar.cli.tables import excluded
from polar.engines.renderers import NAMES, load_renderer
from polar.errors import UsageError
from polar.gateway.sessions import CHAT
from polar.rollout.connect import EMBEDDED, engine_at
from polar.rollout.folder import RunFolder
from polar.specs import Finding
from polar.store.capture import CaptureReader
from polar.store.captured import captured
from polar.tokens.rendering import Renderer
from polar.trajectory.builders import Captured

NAMED_FINDINGS = 20  # more are only counted


def audit_command(path: Path, *, rescore: str | None) -> int:
    """Audit the run, or what a gateway captured alone, at `path`; the exit status."""
    console = output()
    run = _run(path)
    has_ledger = run.folder.ledger.is_file()
    audit = audit_run(run.folder.ledger if has_ledger else None, run.folder.capture, _renderer(console, run))
    console.print(_proof(audit))
    _print_sums(console, run, audit)
    _print_findings(console, [_line(finding, session.session_id) for session in audit.sessions for finding in session.findings])
    if rescore is None:
        return FAILED if audit.findings else 0
    if audit.findings:
        console.print("not rescored: what cannot be proven is not worth comparing", style="yellow")
        return FAILED
    return _rescore(console, run, rescore)


def _run(path: Path) -> Run:
    """The run at `path`; a gateway that ran alone has no ledger, so nothing is known of tasks, sessions and results."""
    folder = RunFolder(path)
    alone = folder.capture.is_file() and not folder.ledger.is_file()
    return Run(folder, (), (), {}) if alone else Run.read(path)


def _renderer(console: Console, run: Run) -> Renderer | None:
    """What rendered the run's prompts; None where the engine did, or the model is not at hand."""
    named = run.meta.get("renderer", "")
    if named == CHAT:
        return None
    if not (model := run.meta.get("model_path", "")):
        console.print(plain("some claims cannot be checked: the run does not say where its model's tokenizer is", "yellow"))
        return None
    # A renderer's name goes on with what tells its vocabulary from others.
    kind = max((name for name in NAMES if f"{named}-".startswith(f"{name}-")), key=len, default="auto")
    try:
        return load_renderer(Path(model), kind)
    except UsageError as error:
        console.print(plain(f"some claims cannot be checked: {error}", "yellow"), soft_wrap=True)
        return None


def _proof(audit: RunAudit) -> Table:
    """A row per claim."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("claim")
    table.add_column("checked", justify="right")
    table.add_column("", no_wrap=True)
    for code, claim in CLAIMS.items():
        skipped = audit.skipped(code)
        checked = f"{count(audit.checked(code))} {claim.unit}" if skipped < len(audit.sessions) or not skipped else "–"
        table.add_row(claim.says, checked, _verdict(audit, code))
    return table


def _verdict(audit: RunAudit, code: str) -> Text:
    """Whether a claim holds, and of how many sessions nobody knows."""
    broken, skipped = sum(finding.code == code for finding in audit.findings), audit.skipped(code)
    if broken:
        return plain(f"✗ {broken} {code}", "bold red")
    if skipped == 0:
        return plain("✓", "green")
    return plain("not checked" if skipped == len(audit.sessions) else f"not checked in {skipped} sessions", "yellow")


def _print_sums(console: Console, run: Run, audit: RunAudit) -> None:
    accounting, unproven = audit.accounting, _unproven(run, audit)
    verdict, style = "proven", "green"
    if audit.findings:
        verdict, style = f"{len(audit.findings)} findings", "red"
    elif unproven:
        verdict, style = f"proven, except {unproven}", "yellow"
    console.print(
        plain(
            f"{run.folder.path}: {verdict} · {count(accounting.sampled)} tokens sampled = {count(accounting.trained)} trained + "
            f"excluded ({excluded(accounting)})",
            style,
        ),
        soft_wrap=True,
    )
    if audit.unfinished:
        console.print(f"{audit.unfinished} sessions are not finished; their tokens are in no sum", style="yellow")


def _unproven(run: Run, audit: RunAudit) -> str:
    """Which claims were not checked, and why: without findings every session was walked, so what they need was missing."""
    missing = {"renderer": "no tokenizer", "ledger": "no ledger"}
    if run.meta.get("renderer") == CHAT:
        missing["renderer"] = "the engine rendered"
    elif audit.had_renderer:
        missing["renderer"] = "something else rendered"
    claims = {needs: [code for code in audit.unproven if CLAIMS[code].needs == needs] for needs in missing}
    return "; ".join(f"{', '.join(codes)}: {missing[needs]}" for needs, codes in claims.items() if codes)


def _print_findings(console: Console, lines: Sequence[str]) -> None:
    for line in lines[:NAMED_FINDINGS]:
        console.print(plain(f"  {line}", "red"), soft_wrap=True)
    if len(lines) > NAMED_FINDINGS:
        console.print(f"  … and {len(lines) - NAMED_FINDINGS} more", style="red")


def _line(finding: Finding, session_id: str = "") -> str:
    where = [f"session {session_id}"] if session_id else []
    where += [f"call {finding.call_id}"] if finding.call_id else []
    return f"{finding.code}: {finding.message}" + (f" ({', '.join(where)})" if where else "")


def _rescore(console: Console, run: Run, engine: str) -> int:
    def note(line: str) -> None:
        console.print(plain(line, "dim"), soft_wrap=True)

    async def work() -> Rescoring:
        model = run.meta.get("model_path", "")
        async with engine_at(engine, model, log=run.folder.engine_log, note=note) as opened:
            return await rescore(opened.engine, _all_captured(run), EXACT if exact else APPROXIMATE)

    exact = engine == EMBEDDED == run.meta.get("engine")
    try:
        rescoring = drive(work(), lambda: note("stopping"))
    except Stopped as stopped:
        return stopped.status
    console.print(_deltas(rescoring))
    for reason, tokens in rescoring.skipped.items():
        console.print(plain(f"not compared: {count(tokens)} tokens, {reason}", "dim"))
    _print_findings(console, [_line(finding) for finding in rescoring.findings])
    return FAILED if rescoring.findings else 0


def _all_captured(run: Run) -> list[Captured]:
    with closing(CaptureReader.open(run.folder.capture)) as reader:
        return [captured(reader, session.session_id) for session in reader.sessions()]


def _deltas(rescoring: Rescoring) -> Table:
    """δ over all tokens, by turn, and by position."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="δ = |recomputed − recorded| log-probability, in nats")
    table.add_column("tokens of")
    for name in ("tokens", "mean δ", "p99", "max"):
        table.add_column(name, justify="right")
    table.add_row(f"all {rescoring.traces} traces", *_cells(rescoring.overall), style="bold", end_section=True)
    for turn, delta in rescoring.by_turn.items():
        table.add_row(f"turn {turn + 1}", *_cells(delta))
    table.add_section()
    for start, delta in rescoring.by_position.items():
        end = POSITION_EDGES[POSITION_EDGES.index(start) + 1 :][:1]
        table.add_row(
            f"positions {count(start)} to {count(end[0] - 1)}" if end else f"positions from {count(start)}", *_cells(delta)
        )
    return table


def _cells(delta: Delta) -> list[str]:
    return [count(delta.tokens), *(f"{value:.2e}" for value in (delta.mean, delta.p99, delta.max))]
