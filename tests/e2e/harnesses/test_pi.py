"""The real Pi over each of its four APIs, and what it makes of faults."""

import pytest

from polar import harnesses
from polar.engines.script import Fault
from polar.harnesses.pi import API
from polar.harnesses.protocol import Turn
from tests.e2e.harnesses.conftest import Run
from tests.e2e.harnesses.dying import Killer, check_stopped_at_once, slow
from tests.e2e.harnesses.rig import FILES, branches, by_prompt, exact, faulty, files, turns

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
PROBE = harnesses.get("pi").probe
DIALECTS = {"chat": "openai_chat", "responses": "openai_responses", "anthropic": "anthropic_messages", "google": "gemini"}


SUMMARY = "## Goal\none.txt is written, and two.txt is still to be written"


def shell(command: str) -> Turn:
    return Turn("", (("bash", {"command": command}),))


def test_every_api_is_tried_below() -> None:
    assert tuple(DIALECTS) == API


@pytest.mark.parametrize("api", DIALECTS)
async def test_one_call_and_two_at_once_are_one_branch(run: Run, api: str) -> None:
    seen = await run("pi", turns(*PROBE), options={"api": api})
    assert (seen.result.status, seen.status, seen.result.findings) == ("completed", 0, ())
    assert {call.dialect for call in seen.calls} == {DIALECTS[api]}
    assert files(seen) == FILES
    assert branches(seen) == [("agent", 3, "")]
    assert seen.unknown_routes == {}
    exact(seen)


@pytest.mark.parametrize("api", DIALECTS)
@pytest.mark.parametrize("fault", ["http_500", "die"])
async def test_a_fault_of_the_engine_costs_one_call_and_no_branch(run: Run, api: str, fault: Fault) -> None:
    seen = await run("pi", faulty(turns(*PROBE), at=1, fault=fault), options={"api": api})
    assert files(seen) == FILES
    assert [call.status for call in seen.calls] == ["ok", "failed", "ok", "ok"]
    assert branches(seen) == [("agent", 3, "")]
    exact(seen)


@pytest.mark.parametrize("api", DIALECTS)
async def test_a_compaction_has_no_tools_and_its_summary_is_gone_on_from(run: Run, api: str) -> None:
    script = by_prompt(
        {
            "You are a context summarization assistant": turns(final=SUMMARY),
            "two.txt is still to be written": turns(shell("true"), shell("printf 'two\\n' > two.txt")),
        },
        turns(shell("printf 'one\\n' > one.txt; seq 1 1500"), *[shell("seq 1 1500")] * 2),
    )
    seen = await run("pi", script, max_model_len=16_000, options={"api": api})
    assert files(seen) == {"one.txt": "one\n", "two.txt": "two\n"}
    assert branches(seen) == [("agent", 3, ""), ("compaction", 1, ""), ("agent", 3, "history_rewritten")]
    exact(seen)


@pytest.mark.parametrize("api", DIALECTS)
async def test_a_pi_that_dies_in_mid_stream_stops_the_engine_at_once(run: Run, api: str) -> None:
    killer = Killer()
    check_stopped_at_once(await run("pi", slow, during=killer, options={"api": api}), killer)
