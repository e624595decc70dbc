"""The real Continue CLI: its loop, its compaction, and what it makes of faults."""

import pytest

from polar import harnesses
from polar.engines.script import Fault
from polar.harnesses.protocol import Turn
from tests.e2e.harnesses.conftest import Run
from tests.e2e.harnesses.dying import Killer, check_stopped_at_once, slow
from tests.e2e.harnesses.rig import FILES, branches, by_prompt, exact, faulty, files, turns

pytestmark = [pytest.mark.wide, pytest.mark.timeout(600)]
PROBE = harnesses.get("continue_cli").probe
SUMMARY = "one.txt is written, and two.txt is still to be written"


def shell(command: str) -> Turn:
    return Turn("", (("Bash", {"command": command}),))


@pytest.mark.parametrize("sandbox", ["process", "bubblewrap"])
async def test_one_call_and_two_at_once_are_one_branch(run: Run, sandbox: str) -> None:
    seen = await run("continue_cli", turns(*PROBE), sandbox=sandbox)
    assert (seen.result.status, seen.status, seen.result.findings) == ("completed", 0, ())
    assert files(seen) == FILES
    assert branches(seen) == [("agent", 3, "")]
    assert seen.unknown_routes == {}
    exact(seen)


@pytest.mark.parametrize("instruction", ["--version", "/help me", "/clear", "look at @given.txt @./given.txt\n\n  end  \n"])
async def test_an_instruction_is_text_whatever_it_says(run: Run, instruction: str) -> None:
    seen = await run("continue_cli", turns(), instruction=instruction, files={"given.txt": "SECRET"})
    (call,) = seen.calls
    said = [seen.captured.messages[digest] for digest in call.message_hashes]
    assert (said[-1].role, said[-1].text) == ("user", instruction.strip())
    exact(seen)


async def test_first_prompts_are_equal_where_the_workspace_has_one_path(run: Run) -> None:
    both = [await run("continue_cli", turns(), sandbox="bubblewrap") for _ in range(2)]
    assert both[0].log[0].prompt_ids == both[1].log[0].prompt_ids


async def test_a_compaction_goes_on_from_the_history_and_its_summary_is_gone_on_from(run: Run) -> None:
    script = by_prompt(
        {
            "Please provide a concise summary of our conversation": turns(final=SUMMARY),
            SUMMARY: turns(shell("printf 'two\\n' > two.txt")),
        },
        turns(shell("printf 'one\\n' > one.txt; yes 'a line of many words' | head -n 500")),
    )
    seen = await run("continue_cli", script, max_model_len=8192)
    assert (seen.status, files(seen)) == (0, {"one.txt": "one\n", "two.txt": "two\n"})
    assert branches(seen) == [
        ("agent+compaction", 2, ""),
        ("agent", 3, "history_rewritten"),  # after an answer that follows a compaction it says "continue", once
    ]
    exact(seen)


@pytest.mark.parametrize("fault", ["http_500", "die"])
async def test_a_fault_of_the_engine_costs_one_call_and_no_branch(run: Run, fault: Fault) -> None:
    seen = await run("continue_cli", faulty(turns(*PROBE), at=1, fault=fault))
    assert (seen.status, files(seen)) == (0, FILES)
    assert [call.status for call in seen.calls] == ["ok", "failed", "ok", "ok"]
    assert branches(seen) == [("agent", 3, "")]
    exact(seen)


async def test_text_of_a_stream_that_broke_stays_in_its_history_so_the_next_turn_forks(run: Run) -> None:
    seen = await run("continue_cli", faulty(turns(*PROBE), at=0, fault="die"))
    assert (seen.status, files(seen)) == (0, FILES)
    assert [call.status for call in seen.calls] == ["failed", "ok", "ok", "ok"]
    assert branches(seen) == [("agent", 1, ""), ("agent", 2, "history_rewritten")]
    exact(seen)


async def test_a_prompt_that_never_fits_ends_the_session(run: Run) -> None:
    seen = await run("continue_cli", turns(), max_model_len=2048)
    assert (seen.status, seen.result.error_kind) == (1, "context_length_exceeded")
    assert {call.status for call in seen.calls} == {"failed"}
    exact(seen)


async def test_a_continue_that_dies_in_mid_stream_stops_the_engine_at_once(run: Run) -> None:
    killer = Killer()
    seen = await run("continue_cli", slow, during=killer)
    check_stopped_at_once(seen, killer)
