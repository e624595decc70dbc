"""Proves a whole run from its ledger and its capture file, or what a gateway captured alone."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from polar.audit.calls import check_sampling, was_asked
from polar.audit.claims import CLAIMS
from polar.audit.proof import Proof
from polar.audit.session import prove_session
from polar.errors import StoreError
from polar.specs import Accounting, Finding, SessionResult
from polar.store.capture import CaptureReader, StoredSession
from polar.store.captured import captured
from polar.store.ledger import LedgerReader, LedgerSession
from polar.tokens.rendering import Renderer
from polar.trajectory.builders import Captured


@dataclass(frozen=True)
class SessionAudit:
    """What was found out about one session.

    Attributes:
        traces, accounting: the ledger's, which the findings confirm or deny; without a ledger the accounting is counted here.
        checked: of how many of its units each claim was checked; a claim that is not named was not checked.
    """

    session_id: str
    calls: int = 0
    traces: int = 0
    accounting: Accounting = field(default_factory=Accounting)
    findings: tuple[Finding, ...] = ()
    checked: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RunAudit:
    """What was found out about a run.

    Attributes:
        sessions: those of the capture file in the order of opening, then those that only the ledger knows.
        unfinished: sessions among them that have no result yet; their tokens are in no accounting.
        had_renderer, had_ledger: what some claims need was there.
    """

    sessions: tuple[SessionAudit, ...]
    unfinished: int
    had_renderer: bool
    had_ledger: bool

    @property
    def accounting(self) -> Accounting:
        return sum((session.accounting for session in self.sessions), Accounting())

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for session in self.sessions for finding in session.findings)

    def checked(self, claim: str) -> int:
        """Of how many of its units a claim was checked."""
        return sum(session.checked.get(claim, 0) for session in self.sessions)

    def skipped(self, claim: str) -> int:
        """Sessions of which a claim was not checked."""
        return sum(claim not in session.checked for session in self.sessions)

    @property
    def unproven(self) -> tuple[str, ...]:
        """Claims that were not checked of every session."""
        return tuple(claim for claim in CLAIMS if self.skipped(claim))


def audit_run(
    ledger: Path | None,
    capture: Path,
    renderer: Renderer | None = None,
    seen: Callable[[SessionAudit], None] = lambda _: None,
) -> RunAudit:
    """Prove every session of a run, or of a gateway that ran alone; `seen` is called after each.

    Args:
        ledger: None for a gateway that ran alone: it has none.
        renderer: of the run's model; sessions that something else rendered are read without it.

    Raises:
        StoreError: one of the files cannot be opened. (What cannot be read of a session is a finding.)
    """
    known = None if ledger is None else _ledger_sessions(ledger)
    with closing(CaptureReader.open(capture)) as reader:
        audits: list[SessionAudit] = []
        stored = {session.session_id: session for session in reader.sessions()}
        for session in stored.values():
            audits.append(_audit_one(session, known, reader, renderer))
            seen(audits[-1])
    missing = Finding("ledger", "the ledger knows it, the capture file does not")
    for session_id in (known or {}).keys() - stored.keys():
        audits.append(SessionAudit(session_id, findings=(missing,), checked={"ledger": 1}))
        seen(audits[-1])
    unfinished = sum(session.result is None for session in (known or {}).values())
    return RunAudit(tuple(audits), unfinished, renderer is not None, known is not None)


def _ledger_sessions(path: Path) -> dict[str, LedgerSession]:
    with closing(LedgerReader.open(path)) as reader:
        return {session.session_id: session for session in reader.sessions()}


def _audit_one(
    stored: StoredSession, ledger: Mapping[str, LedgerSession] | None, reader: CaptureReader, renderer: Renderer | None
) -> SessionAudit:
    session_id = stored.session_id
    try:
        records = captured(reader, session_id)
    except StoreError as error:
        return SessionAudit(session_id, findings=(Finding("unreadable", str(error)),), checked={"unreadable": 1})
    known = None if ledger is None else ledger.get(session_id)
    result = known.result if known else None
    proof = prove_session(records, result, renderer if renderer is not None and renderer.name == stored.renderer else None)
    proof += _check_stored(stored, records)
    if ledger is not None:
        proof += _compare(known, stored, records)
    checked = {claim: units for claim, units in proof.checked.items() if ledger is not None or CLAIMS[claim].needs != "ledger"}
    return SessionAudit(
        session_id=session_id,
        calls=len(records.calls),
        traces=result.traces if result else 0,
        accounting=result.accounting if result else proof.counted if ledger is None else Accounting(),
        findings=tuple(proof.findings),
        checked=checked,
    )


def _check_stored(stored: StoredSession, records: Captured) -> Proof:
    """`sampling`, `unreadable`: what the capture file says of a session as a whole goes together with its calls."""
    asked = sum(map(was_asked, records.calls))
    return Proof(list(check_sampling(records.calls, stored.sampling)), {"unreadable": 1, "sampling": asked})


def _compare(known: LedgerSession | None, stored: StoredSession, records: Captured) -> Proof:
    """`ledger`, `frozen`: both files say the same of a session."""
    finished = known is not None and known.result is not None
    return Proof([*_compare_ledger(known, stored, records)], {"frozen": int(finished)})


def _compare_ledger(known: LedgerSession | None, stored: StoredSession, records: Captured) -> Iterator[Finding]:
    if known is None:
        # A run that is killed between opening a session and noting it leaves one that nobody ever used.
        if records.calls:
            yield Finding("ledger", f"{len(records.calls)} calls are stored of a session that the ledger does not know")
        return
    if stored.task_id != known.task_id:
        yield Finding("ledger", f"it is of task {known.task_id} in the ledger, of {stored.task_id} in the capture file")
    if known.result is not None:
        yield from _compare_result(known.result, known, stored)


def _compare_result(result: SessionResult, known: LedgerSession, stored: StoredSession) -> Iterator[Finding]:
    if not stored.frozen:
        yield Finding("frozen", "it is finished, and still open to calls")
    if (result.session_id, result.task_id, result.sample) != (known.session_id, known.task_id, known.sample):
        yield Finding("ledger", f"its result is that of session {result.session_id}, sample {result.sample} of {result.task_id}")
