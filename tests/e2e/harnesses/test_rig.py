"""The rig itself, with Pi: what it shows is what happened, and what it holds to be exact can fail."""

import dataclasses

import msgspec
import pytest

from polar import harnesses
from polar.engines.script import Fault
from polar.harnesses.protocol import Turn
from tests.e2e.harnesses.conftest import Run
from tests.e2e.harnesses.rig import Stand, branches, by_prompt, exact, faulty, turns

PROBE = harnesses.get("pi").probe
SLOW = turns(Turn("", (("bash", {"command": "sleep 60"}),)))


async def test_a_session_is_seen_whole_and_damage_to_it_is_found(run: Run) -> None:
    seen = await run("pi", turns(*PROBE), files={"given.txt": "given"})
    assert (seen.result.status, seen.status, seen.result.calls) == ("completed", 0, 3)
    assert {path.name: path.read_text() for path in seen.workspace.iterdir()} == {
        "given.txt": "given",
        "hello.txt": "hello\n",
        "one.txt": "one\n",
        "two.txt": "two\n",
    }
    assert branches(seen) == [("agent", 3, "")]
    assert "agent_end" in seen.out
    assert seen.unknown_routes == {}
    exact(seen)
    first = msgspec.structs.replace(seen.log[0], logprobs=[value - 1 for value in seen.log[0].logprobs])
    with pytest.raises(AssertionError, match="other log-probabilities"):
        exact(dataclasses.replace(seen, log=(first, *seen.log[1:])))
    with pytest.raises(AssertionError, match="is no recorded call"):
        exact(dataclasses.replace(seen, captured=dataclasses.replace(seen.captured, calls=seen.calls[1:])))


async def test_a_prompt_may_choose_the_script(run: Run) -> None:
    script = by_prompt({"second errand": turns(final="to the second")}, turns(final="to any other"))
    assert "to the second" in (await run("pi", script, instruction="A second errand.")).out
    assert "to any other" in (await run("pi", script)).out


@pytest.mark.heavy  # Pi waits before it asks again
@pytest.mark.parametrize("fault", ["http_500", "die"])
async def test_a_fault_happens_once_and_where_it_was_asked_for(run: Run, fault: Fault) -> None:
    seen = await run("pi", faulty(turns(*PROBE), at=1, fault=fault))
    exact(seen)
    assert [call.status for call in seen.calls] == ["ok", "failed", "ok", "ok"]


async def test_what_runs_beside_the_harness_can_end_it(run: Run) -> None:
    async def kill(stand: Stand) -> None:
        await stand.answered(1)
        stand.harness().kill()

    seen = await run("pi", SLOW, during=kill)
    assert (seen.status, seen.result.error_kind) == (-9, "harness_crash")
    exact(seen)


async def test_what_still_waits_when_the_harness_has_ended_is_an_error(run: Run) -> None:
    with pytest.raises(AssertionError, match="still waited"):
        await run("pi", turns(), during=lambda stand: stand.asked(2))


async def test_what_fails_beside_the_harness_ends_it(run: Run) -> None:
    async def fail(stand: Stand) -> None:
        await stand.answered(1)
        raise LookupError("not found")

    with pytest.raises(LookupError, match="not found"):
        await run("pi", SLOW, during=fail)
