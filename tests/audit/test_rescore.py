"""Log-probabilities computed again: equal where nothing was changed, and what cannot be compared is counted."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from polar.audit.rescore import APPROXIMATE, EXACT, Rescoring, Tolerance, rescore
from polar.audit.run import audit_run
from polar.engines.scripted import ScriptedEngine, scripted_server
from polar.engines.vllm import VllmEngine
from polar.errors import UsageError
from polar.rollout.folder import RunFolder
from polar.specs import Accounting
from polar.store.capture import CaptureReader
from polar.store.captured import captured
from tests.audit.damage import CUT, WORK, Damage
from tests.audit.folders import reply

Rescore = Callable[..., Awaitable[Rescoring]]


@pytest.fixture
def rescored(smollm2_dir: Path) -> Rescore:
    """Rescore a run with the scripted policy, whose values depend on all that came before."""

    async def go(run: RunFolder, tolerance: Tolerance = EXACT, max_model_len: int = 32_768) -> Rescoring:
        reader = CaptureReader.open(run.capture)
        sessions = [captured(reader, session.session_id) for session in reader.sessions()]
        reader.close()
        tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
        async with scripted_server(ScriptedEngine(tokenizer, reply, max_model_len=max_model_len)) as url:
            engine = VllmEngine(url)
            try:
                return await rescore(engine, sessions, tolerance)
            finally:
                await engine.close()

    return go


def accounting(run: RunFolder) -> Accounting:
    return audit_run(run.ledger, run.capture).accounting


async def test_the_same_policy_gives_the_same_values(finished: RunFolder, rescored: Rescore) -> None:
    rescoring, counted = await rescored(finished), accounting(finished)
    assert (rescoring.traces, rescoring.findings) == (4, ())
    assert (rescoring.overall.tokens, rescoring.overall.max) == (counted.trained, 0.0)
    assert list(rescoring.by_turn) == [0, 1, 2]
    assert sum(delta.tokens for delta in rescoring.by_turn.values()) == counted.trained
    assert sum(delta.tokens for delta in rescoring.by_position.values()) == counted.trained
    assert rescoring.skipped == {f"excluded: {reason}": count for reason, count in counted.excluded.items()}


async def test_one_changed_value_is_found_and_named(run: RunFolder, rescored: Rescore) -> None:
    damage = Damage(run)

    def change(values: object) -> None:
        assert isinstance(values, np.ndarray)
        values[1] -= 0.1

    damage.logprobs(WORK, damage.sampled(WORK, 1), change)
    rescoring = await rescored(run)
    assert rescoring.overall.max == pytest.approx(0.1, abs=1e-5)
    named = [finding for finding in rescoring.findings if finding.call_id]
    assert [finding.code for finding in named] == ["L03"]
    assert named[0].call_id == damage.capture("SELECT call_id FROM calls WHERE session = ? AND ordinal = 1", WORK)[0][0]


async def test_an_engine_with_other_numerics_may_drift_a_little(run: RunFolder, rescored: Rescore) -> None:
    damage = Damage(run)

    def change(values: object) -> None:
        assert isinstance(values, np.ndarray)
        values -= 0.01

    damage.logprobs(WORK, damage.sampled(WORK, 1), change)
    assert (await rescored(run, APPROXIMATE)).findings == ()
    assert (await rescored(run, EXACT)).findings != ()


async def test_another_context_is_found(run: RunFolder, rescored: Rescore) -> None:
    Damage(run).ids(WORK, 0, lambda ids: ids.__setitem__(3, 99))
    rescoring = await rescored(run, APPROXIMATE)
    assert rescoring.overall.mean > 0.05
    assert "on average" in rescoring.findings[0].message


async def test_processed_values_are_compared_only_where_nothing_was_processed(run: RunFolder, rescored: Rescore) -> None:
    damage = Damage(run)
    settings = damage.capture(
        "SELECT DISTINCT settings.body FROM settings JOIN calls ON digest = settings WHERE session = ?", CUT
    )
    for (body,) in settings:
        damage.capture("UPDATE settings SET body = ? WHERE body = ?", body.replace(b"\xa3raw", b"\xa9processed"), body)
    trained = accounting(run).trained
    assert (await rescored(run)).overall.tokens == trained
    damage.call(CUT, 1, resolved={"temperature": 0.7, "top_p": 1.0, "top_k": 0.0})
    rescoring = await rescored(run)
    assert rescoring.skipped["sampling cannot be reproduced by prefill"] == damage.body(CUT, 1).sampled
    assert rescoring.overall.tokens == trained - damage.body(CUT, 1).sampled


async def test_what_the_engine_has_no_room_for_is_skipped(finished: RunFolder, rescored: Rescore) -> None:
    rescoring = await rescored(finished, max_model_len=300)
    assert rescoring.findings == ()
    trained = accounting(finished).trained
    assert rescoring.skipped["beyond the engine's context"] + rescoring.overall.tokens == trained
    assert 0 < rescoring.overall.tokens < trained


async def test_several_policy_versions_are_refused_by_name(run: RunFolder, rescored: Rescore) -> None:
    damage = Damage(run)
    length = damage.body(WORK, 2).sampled
    damage.node(WORK, damage.sampled(WORK), "versions", msgspec.msgpack.encode([(0, 2, 0), (2, length, 1)]))
    with pytest.raises(UsageError, match="policy versions 0, 1"):
        await rescored(run)
