"""One session as a page: its traces with messages and tokens, what is not trained, what was odd."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from polar.chat import Message
from polar.cli.console import count, plain
from polar.cli.runs import Run
from polar.cli.tables import excluded, status
from polar.cli.tokens import Writer
from polar.specs import BuilderName, Finding, Trace, Trajectory
from polar.store.captured import read_captured
from polar.store.ledger import LedgerSession
from polar.tokens.records import Call
from polar.tokens.tree import TokenTree
from polar.trajectory.builders import Captured, build
from polar.trajectory.exclusion import excluded_calls

ROLE_STYLE = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "cyan"}


def show_session(
    console: Console, run: Run, session: LedgerSession, builder: BuilderName, *, messages: bool, writer: Writer | None
) -> None:
    """Print everything that is stored of a session; `writer` None leaves the tokens out.

    Raises:
        CaptureError: its traces cannot be built.
    """
    captured = read_captured(run.folder.capture, session.session_id)
    result = session.result
    reward = result.reward if result else None
    trajectory = build(captured, builder=builder, status=result.status if result else "cancelled", reward=reward)
    _head(console, session)
    for index, trace in enumerate(trajectory.traces):
        console.print(Rule(_title(index, trace), align="left", style="dim"))
        if messages:
            console.print(_conversation(trace), soft_wrap=True)
        if writer is not None:
            console.print(writer.trace(trace), soft_wrap=True)
    _untrained(console, captured)
    for line in asides(captured.calls):
        console.print(plain(line, "dim"), soft_wrap=True)
    _foot(console, trajectory, result.findings if result else trajectory.findings)


def _head(console: Console, session: LedgerSession) -> None:
    line = Text.assemble((session.session_id, "bold"), " ", plain(f"{session.task_id}#{session.sample}"), " ")
    result = session.result
    if result is None:
        console.print(line.append(f"{session.stage}, not finished: what follows is as far as it went", "cyan"), soft_wrap=True)
        return
    reward = "no reward" if result.reward is None else f"reward {result.reward:g}"
    line.append_text(status(result)).append(f" · {reward} · {result.calls} calls · {result.sandbox or 'no'} sandbox")
    line.append(
        f" · prepared {result.timing.preparing:.1f} s, ran {result.timing.running:.1f} s, scored {result.timing.scoring:.1f} s"
    )
    console.print(line, soft_wrap=True)
    if result.error:
        console.print(plain(f"{result.error_kind}: {result.error}", "red"), soft_wrap=True)


def _title(index: int, trace: Trace) -> Text:
    """What a trace is, in a line."""
    left = f", left trace {trace.branch.parent_trace}" if trace.branch.parent_trace is not None else ""
    parts = [
        f"trace {index} ({trace.branch.kind}{left})",
        f"{len(trace.call_ids)} calls",
        f"prompt {count(len(trace.prompt_ids))}",
        f"response {count(len(trace.response_ids))}",
        f"trained {count(int(trace.loss_mask.sum()))}",
        f"weight {trace.weight:.3g}",
        f"ended by {trace.finish_reason}",
        f"policy {_versions(trace)}",
    ]
    return Text(" · ".join(parts))


def _versions(trace: Trace) -> str:
    spans = trace.policy_versions
    if len(spans) == 1:
        return f"version {spans[0].policy_version}"
    return "versions " + ", ".join(f"{span.policy_version} (trained tokens {span.start}–{span.end})" for span in spans)


def _conversation(trace: Trace) -> Text:
    text = Text()
    for message in (*trace.prompt_messages, *trace.response_messages):
        text.append_text(_message(message))
    return text


def _message(message: Message) -> Text:
    head = f"{message.role} {message.tool_call_id}".rstrip()
    text = Text().append_text(plain(f"{head}\n", f"bold {ROLE_STYLE[message.role]}"))
    for part in _parts(message):
        text.append_text(part).append("\n")
    return text


def _parts(message: Message) -> Iterator[Text]:
    if message.reasoning:
        yield plain(message.reasoning, "dim italic")
    if message.text:
        yield plain(message.text)
    for call in message.tool_calls:
        yield Text.assemble("→ ", plain(call.name, "bold"), " ", plain(call.arguments), " ", plain(call.id, "dim"))


def _untrained(console: Console, captured: Captured) -> None:
    """The calls that no trace trains, with what they said."""
    reasons = excluded_calls(captured.calls, TokenTree(captured.nodes))
    calls = [call for call in captured.calls if call.call_id in reasons]
    if calls:
        console.print(Rule(Text("not trained"), align="left", style="dim"))
    for call in calls:
        console.print(plain(f"{call.call_id} {reasons[call.call_id]}, {call.sampled} tokens: {_said(call)}"), soft_wrap=True)


def asides(calls: Sequence[Call]) -> list[str]:
    """What calls asked and the policy was not given, what was read as if it were not there, and kinds beside the agent's."""
    kinds: list[str] = [call.kind for call in calls]
    named: dict[str, list[str]] = {
        "not served": [name for call in calls for name in call.unserved],
        "normalised": [name for call in calls for name in call.normalisers],
        "kinds": kinds if set(kinds) != {"agent"} else [],
    }
    return [
        f"{title}: " + ", ".join(f"{name} ({times} call{'s' if times > 1 else ''})" for name, times in Counter(names).items())
        for title, names in named.items()
        if names
    ]


def _said(call: Call) -> str:
    if call.error:
        return call.error
    return " ".join(choice.message.text for choice in call.choices) or "(no text)"


def _foot(console: Console, trajectory: Trajectory, findings: tuple[Finding, ...]) -> None:
    console.print(Rule(style="dim"))
    for finding in findings:
        where = f" (call {finding.call_id})" if finding.call_id else ""
        console.print(plain(f"{finding.code}: {finding.message}{where}", "yellow"), soft_wrap=True)
    accounting = trajectory.accounting
    console.print(
        f"{count(accounting.sampled)} sampled = {count(accounting.trained)} trained + excluded ({excluded(accounting)})"
        f" · {len(trajectory.traces)} traces by {trajectory.builder}",
        soft_wrap=True,
    )
