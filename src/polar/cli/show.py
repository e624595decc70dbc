"""`polar show`: a run as tables, a session as messages and tokens."""

import shlex
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polar.cli.console import count, output, plain
from polar.cli.runs import Run, find
from polar.cli.session import show_session
from polar.cli.tables import per_task, status
from polar.cli.tokens import Writer
from polar.errors import UsageError
from polar.specs import BuilderName
from polar.store.ledger import LedgerSession

MANY_FINDINGS = 3  # more are only counted


def show_command(
    target: str, *, run: Path | None, logprobs: bool, only_tokens: bool, only_messages: bool, builder: BuilderName
) -> None:
    """Show what `target` names."""
    console = output()
    found, session = find(target, run)
    if session is None:
        _show_run(console, found)
    else:
        writer = None if only_messages else _writer(console, found, logprobs)
        show_session(console, found, session, builder, messages=not only_tokens, writer=writer)


def _show_run(console: Console, run: Run) -> None:
    meta = [f"{name} {run.meta[name]}" for name in ("model", "engine", "renderer", "sandbox") if name in run.meta]
    console.print(plain(" · ".join([str(run.folder.path), *meta]), "dim"), soft_wrap=True)
    if run.results:
        console.print(per_task(run.results))
        console.print()
    console.print(_sessions(run))
    if run.sessions:
        one = shlex.quote(f"{run.folder.path}/{run.sessions[0].session_id}")
        console.print(plain(f"one of them: polar show {one}", "dim"), soft_wrap=True)


def _sessions(run: Run) -> Table:
    """A row per attempt."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("session", no_wrap=True)
    table.add_column("task", overflow="fold")
    table.add_column("status", no_wrap=True)
    for name in ("reward", "calls", "sampled", "trained"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("findings", overflow="fold")
    for session in run.sessions:
        table.add_row(session.session_id, plain(_place(session)), *_outcome(session))
    return table


def _place(session: LedgerSession) -> str:
    attempt = f", attempt {session.attempt + 1}" if session.attempt else ""
    return f"{session.task_id}#{session.sample}{attempt}"


def _outcome(session: LedgerSession) -> list[str | Text]:
    result = session.result
    if result is None:
        return [plain(session.stage, "cyan")]
    codes = [finding.code for finding in result.findings]
    findings = ", ".join(codes[:MANY_FINDINGS]) + (
        f" and {len(codes) - MANY_FINDINGS} more" if len(codes) > MANY_FINDINGS else ""
    )
    reward = "–" if result.reward is None else f"{result.reward:g}"
    sampled, trained = result.accounting.sampled, result.accounting.trained
    error = f"{result.error_kind} " if result.error_kind else ""
    return [status(result), reward, count(result.calls), count(sampled), count(trained), plain(error + findings)]


def _writer(console: Console, run: Run, logprobs: bool) -> Writer:
    """What writes tokens: as text where the model's tokenizer is at hand, else as ids."""
    from polar.engines.renderers import load_renderer

    try:
        decode = load_renderer(Path(run.meta.get("model_path", ""))).decode
    except UsageError as error:
        console.print(plain(f"tokens are shown as ids: {error}", "yellow"), soft_wrap=True)
        decode = None
    return Writer(decode, logprobs=logprobs, marks=console.no_color or not console.is_terminal)
