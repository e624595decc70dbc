"""The real mini-swe-agent: no streams, turns that it drops, and what it makes of faults."""

import pytest

from polar import harnesses
from polar.engines.script import Fault, Scripted, ScriptedCall
from polar.harnesses.protocol import Turn
from tests.e2e.harnesses.conftest import Run
from tests.e2e.harnesses.dying import Killer, slow
from tests.e2e.harnesses.rig import FILES, branches, exact, faulty, files, turns

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
PROBE = harnesses.get("mini_swe_agent").probe


@pytest.mark.parametrize("sandbox", ["process", "bubblewrap"])
async def test_one_call_and_two_at_once_are_one_branch(run: Run, sandbox: str) -> None:
    seen = await run("mini_swe_agent", turns(*PROBE), sandbox=sandbox)
    assert (seen.result.status, seen.status, seen.result.findings) == ("completed", 0, ())
    assert files(seen) == FILES
    assert branches(seen) == [("agent", 3, "")]
    exact(seen)


@pytest.mark.parametrize("fault", ["http_500", "die"])
async def test_a_fault_of_the_engine_costs_one_call_and_no_branch(run: Run, fault: Fault) -> None:
    seen = await run("mini_swe_agent", faulty(turns(*PROBE), at=1, fault=fault))
    assert files(seen) == FILES
    assert [call.status for call in seen.calls] == ["ok", "failed", "ok", "ok"]
    assert branches(seen) == [("agent", 3, "")]
    exact(seen)


async def test_a_turn_without_a_tool_call_is_dropped_and_stays_a_branch(run: Run) -> None:
    asked = iter([Turn("Let me think first."), *PROBE])

    def script(call: ScriptedCall) -> Scripted:
        return turns(next(asked))(ScriptedCall(call.request_id, call.prompt_ids, call.prompt_text, 0))

    seen = await run("mini_swe_agent", script)
    assert files(seen) == FILES
    assert branches(seen) == [("agent", 1, ""), ("agent", 3, "")]
    exact(seen)


async def test_a_prompt_that_never_fits_ends_the_session(run: Run) -> None:
    seen = await run("mini_swe_agent", turns(*PROBE), max_model_len=600)
    assert [call.status for call in seen.calls] == ["failed"]
    assert seen.result.reward is None
    exact(seen)


async def test_a_mini_swe_agent_that_dies_while_the_policy_speaks_leaves_nothing_trained(run: Run) -> None:
    killer = Killer()
    seen = await run("mini_swe_agent", slow, during=killer)
    (call,) = seen.calls
    assert call.status == "aborted"
    assert seen.trajectory.traces == ()
    exact(seen)
