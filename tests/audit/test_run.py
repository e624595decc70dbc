"""A finished run is proven; whatever is changed in its files afterwards is found, under its own name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from polar.audit import traces
from polar.audit.calls import check_sampled
from polar.audit.claims import CLAIMS
from polar.audit.ground import Ground
from polar.audit.run import RunAudit, audit_run
from polar.chat import Message, TextPart
from polar.rollout.folder import RunFolder
from polar.specs import Accounting, Trace, Trajectory
from polar.store.capture import CaptureReader, StoredSession
from polar.store.captured import read_captured
from polar.tokens.rendering import Renderer
from polar.trajectory.builders import build
from tests.audit.damage import CUT, HANG_UP, REWRITE, WORK, Damage


def test_a_finished_run_is_proven(finished: RunFolder, renderer: Renderer) -> None:
    audit = audit_run(finished.ledger, finished.capture, renderer)
    assert audit.findings == ()
    assert [(session.calls, session.traces) for session in audit.sessions] == [(3, 1), (4, 2), (2, 1), (1, 0)]
    assert audit.accounting.holds
    assert set(audit.accounting.excluded) == {"superseded", "aborted"}
    assert audit.accounting.trained > 200
    assert audit.unfinished == 0


def test_without_the_model_what_needs_no_tokenizer_is_proven(finished: RunFolder) -> None:
    audit = audit_run(finished.ledger, finished.capture)
    assert (audit.findings, audit.had_renderer) == ((), False)
    assert audit.unproven == ("T06", "reply")
    assert (audit.checked("T06"), audit.skipped("T06")) == (0, 4)


def test_what_something_else_rendered_is_read_without_a_renderer(run: RunFolder, renderer: Renderer) -> None:
    body = Damage(run).capture("SELECT body FROM sessions WHERE session = ?", WORK)[0][0]
    other = msgspec.structs.replace(msgspec.msgpack.decode(body, type=StoredSession), renderer="")
    Damage(run).capture("UPDATE sessions SET body = ? WHERE session = ?", msgspec.msgpack.encode(other), WORK)
    audit = audit_run(run.ledger, run.capture, renderer)
    assert (audit.findings, audit.unproven) == ((), ("T06", "reply"))
    assert audit.skipped("reply") == 1


def test_without_a_ledger_what_needs_none_is_proven(finished: RunFolder, renderer: Renderer) -> None:
    audit = audit_run(None, finished.capture, renderer)
    assert (audit.findings, audit.had_ledger, audit.unfinished) == ((), False, 0)
    assert audit.unproven == ("weights", "ledger", "frozen")
    whole = audit_run(finished.ledger, finished.capture, renderer).accounting
    assert (audit.accounting.sampled, audit.accounting.trained) == (whole.sampled, 0)
    assert audit.accounting.excluded["no_reward"] == whole.trained


def test_it_counts_what_was_checked(finished: RunFolder, renderer: Renderer) -> None:
    audit = audit_run(finished.ledger, finished.capture, renderer)
    assert audit.unproven == ()
    counts = {
        code: audit.checked(code) for code in ("prompt_hash", "T01", "place", "tool_call_id", "path", "weights", "L02", "mask")
    }
    sampled = audit.accounting.sampled
    assert counts == {
        "prompt_hash": 10, "T01": 4, "place": 10, "tool_call_id": 4, "path": 12, "weights": 3, "L02": sampled, "mask": sampled
    }  # fmt: skip
    assert audit.checked("mask_values") == audit.accounting.trained


def test_what_a_damaged_tree_keeps_from_being_checked_is_not_counted(run: RunFolder, renderer: Renderer) -> None:
    whole = audit_run(run.ledger, run.capture, renderer)
    Damage(run).node(WORK, 2, "parent", 4)
    audit = audit_run(run.ledger, run.capture, renderer)
    assert found(audit) == {"tree"}
    assert audit.checked("tree") == whole.checked("tree")
    assert audit.checked("prompt_hash") == whole.checked("prompt_hash") - 3
    assert audit.checked("L02") < whole.checked("L02")
    assert set(audit.unproven) == set(CLAIMS) - {"tree", "unreadable", "frozen", "sampling"}
    assert audit.skipped("mask") == 1


def test_what_a_builder_refuses_is_not_counted(run: RunFolder, renderer: Renderer) -> None:
    Damage(run).call(CUT, 1, sampled=3)
    audit = audit_run(run.ledger, run.capture, renderer)
    assert set(audit.unproven) == {"path", "mask", "mask_values", "accounting", "weights", "ledger"}


FIRST = "(SELECT min(message) FROM messages WHERE CAST(body AS TEXT) LIKE '{%')"  # tools are lists
OTHER_MESSAGE = msgspec.json.encode(Message("user", (TextPart("Do something else."),)))


def found(audit: RunAudit) -> set[str]:
    return {finding.code for finding in audit.findings}


def flip(place: int = 0) -> Callable[[Any], None]:
    def change(ids: Any) -> None:
        ids[place] += 1

    return change


def put(place: int, value: float) -> Callable[[Any], None]:
    def change(array: Any) -> None:
        array[place] = value

    return change


def spans(*values: tuple[int, int, int]) -> bytes:
    return msgspec.msgpack.encode(values)


def share_a_span(damage: Damage) -> None:
    """Both calls of the cut session say that they sampled the first one's tokens."""
    first, second = (damage.body(CUT, ordinal).choices[0] for ordinal in (0, 1))
    damage.call(CUT, 1, choices=(msgspec.structs.replace(second, node=first.node),))


def put_words(damage: Damage) -> None:
    """The harness was told something else than the ids say."""
    said = damage.body(WORK, 2).choices[0]
    damage.call(WORK, 2, choices=(msgspec.structs.replace(said, message=Message("assistant", (TextPart("No."),))),))


def splice_a_fork(damage: Damage) -> None:
    damage.call(REWRITE, 3, fork_reason="", parent_call=name(damage, REWRITE, 2))


def rename_a_tool_call(damage: Damage) -> None:
    said = damage.body(WORK, 0).choices[0]
    call = msgspec.structs.replace(said.message.tool_calls[0], id="call_c0zzzzzzzz_0_0")
    damage.call(
        WORK, 0, choices=(msgspec.structs.replace(said, message=msgspec.structs.replace(said.message, tool_calls=(call,))),)
    )


FAULTS: list[tuple[str, str, Callable[[Damage], object]]] = [
    ("tree", "an offset beyond the parent's end", lambda d: d.node(WORK, d.sampled(WORK, 1), "offset", 10_000)),
    ("tree", "a parent that comes later", lambda d: d.node(WORK, 2, "parent", 4)),
    ("tree", "a node dropped from the middle", lambda d: d.capture("DELETE FROM nodes WHERE session = ? AND node_id = 2", WORK)),
    (
        "tree",
        "the last node dropped",
        lambda d: d.capture("DELETE FROM nodes WHERE session = ? AND node_id = ?", WORK, d.sampled(WORK)),
    ),
    ("prompt_hash", "an id of the first context", lambda d: d.ids(WORK, 0, flip(3))),
    ("prompt_hash", "a sampled id that a later prompt holds", lambda d: d.ids(WORK, d.sampled(WORK, 0), flip(2))),
    ("prompt_hash", "an offset one token less", lambda d: move(d, WORK, 2, -1)),
    ("prompt_tokens", "a prompt's count", lambda d: d.call(WORK, 1, prompt_tokens=d.body(WORK, 1).prompt_tokens + 1)),
    ("T01", "an offset one token less", lambda d: move(d, WORK, 2, -1)),
    (
        "T01",
        "a fork that calls itself a continuation",
        lambda d: d.call(REWRITE, 3, fork_reason="", parent_call=name(d, REWRITE, 2)),
    ),
    ("lineage", "a parent that nobody stored", lambda d: d.call(WORK, 1, parent_call="c9zzzzzzzz")),
    ("lineage", "a call that replaces a later one", lambda d: d.call(CUT, 0, replaces=name(d, CUT, 1))),
    ("owner", "two calls with one span", share_a_span),
    ("owner", "a call dropped", lambda d: d.capture("DELETE FROM calls WHERE session = ?", HANG_UP)),
    ("owner", "a span of another call", lambda d: d.node(WORK, d.sampled(WORK), "call_id", name(d, WORK, 0))),
    ("place", "a span moved by one token", lambda d: move(d, WORK, d.sampled(WORK), -1)),
    ("T08", "a call's count of sampled tokens", lambda d: d.call(WORK, 2, sampled=d.body(WORK, 2).sampled + 1)),
    ("sampling", "a temperature that nobody chose", lambda d: d.call(WORK, 1, resolved=sampling(temperature=0.7))),
    ("sampling", "a top_p that nobody chose", lambda d: d.call(WORK, 1, resolved=sampling(top_p=0.9))),
    ("sampling", "a top_k that nobody chose", lambda d: d.call(WORK, 1, resolved=sampling(top_k=5.0))),
    ("sampling", "a call that does not say", lambda d: d.call(WORK, 1, resolved={})),
    ("L02", "NaN", lambda d: d.logprobs(WORK, d.sampled(WORK), put(1, float("nan")))),
    ("L02", "a sentinel", lambda d: d.logprobs(WORK, d.sampled(WORK), put(1, -9999.0))),
    ("L02", "a positive value", lambda d: d.logprobs(WORK, d.sampled(WORK), put(1, 0.1))),
    ("W01", "versions that end too early", lambda d: d.node(WORK, d.sampled(WORK), "versions", spans((0, 2, 0)))),
    ("W01", "versions with a hole", lambda d: d.node(WORK, d.sampled(WORK), "versions", spans((0, 2, 0), (3, 99, 0)))),
    ("T06", "a reply that ends without its stop id", lambda d: d.ids(WORK, d.sampled(WORK), put(-1, 100))),
    ("T06", "a stop id in the middle", lambda d: d.ids(WORK, d.sampled(WORK), put(1, 2))),
    ("reply", "an id of the last answer", lambda d: d.ids(WORK, d.sampled(WORK), flip(1))),
    ("reply", "what the harness was told", put_words),
    ("tool_call_id", "a tool call's id", rename_a_tool_call),
    (
        "message",
        "what a message says",
        lambda d: d.capture(f"UPDATE messages SET body = ? WHERE message = {FIRST}", OTHER_MESSAGE),
    ),
    ("message", "the fingerprint of a history", lambda d: d.call(WORK, 1, chain=d.body(WORK, 0).chain)),
    ("build", "another temperature within a trace", lambda d: d.call(WORK, 1, resolved=sampling(temperature=0.7))),
    ("build", "tokens that do not add up", lambda d: d.call(CUT, 1, sampled=3)),
    ("ledger", "calls", lambda d: d.result(WORK, calls=2)),
    ("ledger", "traces", lambda d: d.result(WORK, traces=2)),
    ("ledger", "tokens", lambda d: d.result(WORK, accounting=Accounting(103, 100, {"aborted": 3}))),
    ("ledger", "another task", lambda d: d.ledger("UPDATE sessions SET task_id = 'cuts', attempt = 9 WHERE rowid = 1")),
    ("ledger", "a session dropped from the ledger", lambda d: d.ledger("DELETE FROM sessions WHERE rowid = 1")),
    ("ledger", "a session dropped from the capture file", lambda d: drop(d, CUT)),
    ("frozen", "a finished session reopened", lambda d: d.capture("UPDATE sessions SET frozen = 0 WHERE session = ?", WORK)),
    ("unreadable", "tools dropped", lambda d: d.capture("DELETE FROM messages WHERE CAST(body AS TEXT) LIKE '[%'")),
    ("unreadable", "a call of garbage", lambda d: d.capture("UPDATE calls SET body = x'c1' WHERE session = ?", WORK)),
    (
        "unreadable",
        "a call that others build on",
        lambda d: d.capture("DELETE FROM calls WHERE session = ? AND ordinal = 0", WORK),
    ),
    ("unreadable", "ids cut in the middle", lambda d: d.node(WORK, 0, "ids", b"123")),
]


def sampling(**otherwise: float) -> dict[str, float]:
    return {"max_tokens": 100.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0.0, **otherwise}


def name(damage: Damage, session: int, ordinal: int) -> str:
    found = damage.capture("SELECT call_id FROM calls WHERE session = ? AND ordinal = ?", session, ordinal)
    return str(found[0][0])


def move(damage: Damage, session: int, node: int, by: int) -> None:
    damage.capture('UPDATE nodes SET "offset" = "offset" + ? WHERE session = ? AND node_id = ?', by, session, node)


def drop(damage: Damage, session: int) -> None:
    for table in ("calls", "nodes", "sessions"):
        damage.capture(f"DELETE FROM {table} WHERE session = ?", session)


@pytest.mark.parametrize(("code", "what", "do"), FAULTS, ids=[f"{code}: {what}" for code, what, _ in FAULTS])
def test_what_was_changed_is_found(
    code: str, what: str, do: Callable[[Damage], object], run: RunFolder, renderer: Renderer
) -> None:
    do(Damage(run))
    assert code in found(audit_run(run.ledger, run.capture, renderer)), what


def test_only_the_damaged_session_has_findings(run: RunFolder, renderer: Renderer) -> None:
    Damage(run).ids(REWRITE, 0, flip(3))
    audit = audit_run(run.ledger, run.capture, renderer)
    assert [bool(session.findings) for session in audit.sessions] == [False, True, False, False]


def test_a_finding_names_the_call(run: RunFolder, renderer: Renderer) -> None:
    damage = Damage(run)
    damage.call(WORK, 1, prompt_tokens=1)
    finding = next(f for f in audit_run(run.ledger, run.capture, renderer).findings if f.code == "prompt_tokens")
    assert finding.call_id == name(damage, WORK, 1)
    assert finding.message.endswith("ids, the prompt had 1")


def test_a_session_that_was_opened_and_never_used_is_no_finding(run: RunFolder, renderer: Renderer) -> None:
    damage = Damage(run)
    damage.capture("DELETE FROM calls WHERE session = ?", HANG_UP)
    damage.capture("DELETE FROM nodes WHERE session = ?", HANG_UP)
    damage.ledger("DELETE FROM stage_changes")
    damage.ledger("DELETE FROM sessions WHERE rowid = ?", HANG_UP)
    assert audit_run(run.ledger, run.capture, renderer).findings == ()


def test_values_that_do_not_go_with_their_ids_are_found(finished: RunFolder) -> None:
    session = CaptureReader.open(finished.capture).sessions()[0]
    records = read_captured(finished.capture, session.session_id)
    nodes = [replace(node, logprobs=node.logprobs[1:]) if node.logprobs is not None else node for node in records.nodes]
    codes = {finding.code for finding in check_sampled(records.calls, Ground(nodes), None)}
    assert codes == {"T08"}


def test_a_session_without_a_result_is_counted_as_unfinished(run: RunFolder, renderer: Renderer) -> None:
    Damage(run).ledger("UPDATE sessions SET result = NULL WHERE rowid = 1")
    audit = audit_run(run.ledger, run.capture, renderer)
    assert (audit.unfinished, audit.findings) == (1, ())


def first(trajectory: Trajectory, **fields: Any) -> Trajectory:
    """The trajectory with its first trace changed."""
    if not trajectory.traces:
        return trajectory
    return replace(trajectory, traces=(replace(trajectory.traces[0], **fields), *trajectory.traces[1:]))


def trained_too_much(trace: Trace) -> Any:
    mask = trace.loss_mask.copy()
    mask[mask.argmin()] = 1
    return mask


def unfair(trajectory: Trajectory) -> Trajectory:
    even = 1 / max(len(trajectory.traces), 1)
    return replace(trajectory, traces=tuple(replace(trace, weight=even) for trace in trajectory.traces))


SPOILT: list[tuple[str, str, Callable[[Trajectory], Trajectory]]] = [
    ("path", "other ids", lambda t: first(t, response_ids=t.traces[0].response_ids[::-1]) if t.traces else t),
    ("mask", "a trace left out", lambda t: replace(t, traces=t.traces[1:])),
    ("mask", "an answer left out", lambda t: first(t, loss_mask=np.zeros_like(t.traces[0].loss_mask)) if t.traces else t),
    ("mask", "a context token", lambda t: first(t, loss_mask=trained_too_much(t.traces[0])) if len(t.traces) == 1 else t),
    ("path", "a trace twice", lambda t: replace(t, traces=(*t.traces, *t.traces[:1]))),
    ("mask_values", "other values", lambda t: first(t, response_logprobs=t.traces[0].response_logprobs - 1) if t.traces else t),
    ("mask_values", "other versions", lambda t: first(t, policy_versions=()) if t.traces else t),
    ("accounting", "other sums", lambda t: replace(t, accounting=Accounting(7, 7))),
    ("weights", "a share too much", lambda t: first(t, weight=1.5) if t.traces else t),
    ("weights", "shares that sum to 1 and are not by tokens", unfair),
    ("weights", "no number", lambda t: first(t, weight=float("nan")) if t.traces else t),
    ("weights", "another reward", lambda t: first(t, reward=0.5) if t.traces else t),
]


@pytest.mark.parametrize(("code", "what", "spoil"), SPOILT, ids=[f"{code}: {what}" for code, what, _ in SPOILT])
def test_an_error_of_the_builders_is_found(
    code: str, what: str, spoil: Callable[[Trajectory], Trajectory], finished: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "build", lambda *args, **options: spoil(build(*args, **options)))
    assert code in found(audit_run(finished.ledger, finished.capture)), what


def test_every_claim_has_a_fault_that_it_finds() -> None:
    assert {code for code, *_ in FAULTS} | {code for code, *_ in SPOILT} == set(CLAIMS)
