"""The real Gemini CLI: its loop, its sub-agents, and what it makes of faults."""

import pytest

from polar import harnesses
from polar.engines.script import Fault
from polar.harnesses.protocol import Turn
from tests.e2e.harnesses.conftest import Run
from tests.e2e.harnesses.dying import Killer, check_stopped_at_once, slow
from tests.e2e.harnesses.rig import FILES, branches, by_prompt, exact, faulty, files, turns

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
PROBE = harnesses.get("gemini_cli").probe


def shell(command: str, text: str = "") -> Turn:
    return Turn(text, (("run_shell_command", {"command": command}),))


def errand(prompt: str) -> tuple[str, dict[str, object]]:
    return "invoke_agent", {"agent_name": "generalist", "prompt": prompt}


def done(result: str) -> Turn:
    return Turn("", (("complete_task", {"result": {"response": result}}),))


@pytest.mark.parametrize("sandbox", ["process", "bubblewrap"])
async def test_one_call_and_two_at_once_are_one_branch(run: Run, sandbox: str) -> None:
    seen = await run("gemini_cli", turns(*PROBE), sandbox=sandbox)
    assert (seen.result.status, seen.status, seen.result.findings) == ("completed", 0, ())
    assert files(seen) == FILES
    assert branches(seen) == [("agent", 3, "")]
    assert seen.unknown_routes == {}
    exact(seen)


async def test_first_prompts_are_equal_where_the_workspace_has_one_path(run: Run) -> None:
    both = [await run("gemini_cli", turns(), sandbox="bubblewrap") for _ in range(2)]
    assert both[0].log[0].prompt_ids == both[1].log[0].prompt_ids


MENTIONS = "look at @given.txt, \\@given.txt and @{given.txt}"
SIGNS = "!{ls} {{args}} $& \x7f\r\n\n  end "


@pytest.mark.parametrize("instruction", ["--version", "/help me", MENTIONS, SIGNS])
async def test_an_instruction_is_text_whatever_it_says(run: Run, instruction: str) -> None:
    seen = await run("gemini_cli", turns(), instruction=instruction, files={"given.txt": "SECRET"})
    (call,) = seen.calls
    said = [seen.captured.messages[digest] for digest in call.message_hashes]
    assert (said[-1].role, said[-1].content[-1].text) == ("user", instruction)
    assert "SECRET" not in said[-1].text
    exact(seen)


async def test_each_sub_agent_is_a_branch_of_its_own(run: Run) -> None:
    script = by_prompt(
        {
            "delegate it all": turns(Turn("", (errand("FIRST ERRAND: write one.txt"), errand("SECOND ERRAND: write two.txt")))),
            "FIRST ERRAND": turns(shell("printf 'one\\n' > one.txt"), done("one is written")),
            "SECOND ERRAND": turns(shell("printf 'two\\n' > two.txt"), done("two is written")),
        },
        turns(final="nobody asked"),
    )
    seen = await run("gemini_cli", script, instruction="Please delegate it all.")
    assert (seen.status, files(seen)) == (0, {"one.txt": "one\n", "two.txt": "two\n"})
    assert branches(seen) == [("agent", 2, ""), ("subagent", 2, ""), ("subagent", 2, "")]
    exact(seen)


FAULTS = [(1, "http_500"), (0, "die"), (1, "die")]  # the first reply has text, which streams; the second has none


@pytest.mark.parametrize(("at", "fault"), FAULTS)
async def test_a_fault_of_the_engine_costs_one_call_and_no_branch(run: Run, at: int, fault: Fault) -> None:
    seen = await run("gemini_cli", faulty(turns(*PROBE), at=at, fault=fault))
    assert (seen.status, files(seen)) == (0, FILES)
    assert [call.status for call in seen.calls] == [*["ok"] * at, "failed", *["ok"] * (3 - at)]
    assert branches(seen) == [("agent", 3, "")]
    exact(seen)


async def test_a_prompt_that_does_not_fit_ends_the_session_and_keeps_what_was_captured(run: Run) -> None:
    """Its compaction cuts before a user's turn: a session with one instruction has none to cut at."""
    seen = await run("gemini_cli", turns(shell("seq 1 4000"), shell("seq 1 3000")), max_model_len=40_000)
    assert seen.status != 0
    assert [call.status for call in seen.calls] == ["ok", "ok", "failed"]
    assert [finding.code for finding in seen.calls[2].findings] == ["context_length_exceeded"]
    assert branches(seen) == [("agent", 2, "")]
    exact(seen)


async def test_a_gemini_cli_that_dies_in_mid_stream_stops_the_engine_at_once(run: Run) -> None:
    killer = Killer()
    check_stopped_at_once(await run("gemini_cli", slow, during=killer), killer)
