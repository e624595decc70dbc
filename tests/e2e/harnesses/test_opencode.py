"""The real OpenCode: its loop, its sub-agents, its compaction, and what it makes of faults."""

import pytest

from polar import harnesses
from polar.engines.script import Fault
from polar.harnesses.protocol import Turn
from tests.e2e.harnesses.conftest import Run
from tests.e2e.harnesses.dying import Killer, check_stopped_at_once, slow
from tests.e2e.harnesses.rig import FILES, branches, by_prompt, exact, faulty, files, turns

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
PROBE = harnesses.get("opencode").probe
SUMMARY = "## Goal\none.txt is written, and two.txt is still to be written"


def run_shell(command: str) -> tuple[str, dict[str, object]]:
    return "bash", {"command": command, "description": "does it"}


def shell(command: str, text: str = "") -> Turn:
    return Turn(text, (run_shell(command),))


def errand(prompt: str) -> tuple[str, dict[str, object]]:
    return "task", {"description": "an errand", "prompt": prompt, "subagent_type": "general"}


@pytest.mark.parametrize("sandbox", ["process", "bubblewrap"])
async def test_one_call_and_two_at_once_are_one_branch(run: Run, sandbox: str) -> None:
    seen = await run("opencode", turns(*PROBE), sandbox=sandbox)
    assert (seen.result.status, seen.status, seen.result.findings) == ("completed", 0, ())
    assert files(seen) == FILES
    assert branches(seen) == [("agent", 3, "")]
    assert seen.unknown_routes == {}
    exact(seen)


async def test_first_prompts_are_equal_where_the_workspace_has_one_path(run: Run) -> None:
    both = [await run("opencode", turns(), sandbox="bubblewrap") for _ in range(2)]
    assert both[0].log[0].prompt_ids == both[1].log[0].prompt_ids


@pytest.mark.parametrize("instruction", ["--version", "/help me", "look at @given.txt", "!`ls` $ARGUMENTS $1\n\n  end"])
async def test_an_instruction_is_text_whatever_it_says(run: Run, instruction: str) -> None:
    seen = await run("opencode", turns(), instruction=instruction, files={"given.txt": "SECRET"})
    (call,) = seen.calls
    said = [seen.captured.messages[digest] for digest in call.message_hashes]
    assert (said[-1].role, said[-1].text) == ("user", instruction)
    exact(seen)


async def test_each_sub_agent_is_a_branch_of_its_own(run: Run) -> None:
    script = by_prompt(
        {
            "delegate it all": turns(Turn("", (errand("FIRST ERRAND: write one.txt"), errand("SECOND ERRAND: write two.txt")))),
            "FIRST ERRAND": turns(shell("printf 'one\\n' > one.txt")),
            "SECOND ERRAND": turns(shell("printf 'two\\n' > two.txt")),
        },
        turns(final="nobody asked"),
    )
    seen = await run("opencode", script, instruction="Please delegate it all.")
    assert (seen.status, files(seen)) == (0, {"one.txt": "one\n", "two.txt": "two\n"})
    assert branches(seen) == [("agent", 2, ""), ("subagent", 2, ""), ("subagent", 2, "")]
    exact(seen)


async def test_a_compaction_has_no_tools_and_its_summary_is_gone_on_from(run: Run) -> None:
    script = by_prompt(
        {
            "You are a context summarization agent": turns(final=SUMMARY),
            "two.txt is still to be written": turns(*[shell("true")] * 3, shell("printf 'two\\n' > two.txt")),
        },
        turns(shell("printf 'one\\n' > one.txt; seq 1 4000"), shell("seq 1 3000")),
    )
    seen = await run("opencode", script, max_model_len=30_000)
    assert (seen.status, files(seen)) == (0, {"one.txt": "one\n", "two.txt": "two\n"})
    assert branches(seen) == [("agent", 3, ""), ("compaction", 1, ""), ("agent", 5, "history_rewritten")]
    exact(seen)


async def test_a_prompt_that_does_not_fit_is_compacted_though_the_exit_status_is_a_failure(run: Run) -> None:
    script = by_prompt(
        {
            "You are a context summarization agent": turns(final=SUMMARY),
            "two.txt is still to be written": turns(shell("printf 'two\\n' > two.txt")),
        },
        turns(Turn("", (run_shell("printf 'one\\n' > one.txt; seq 1 4000"), run_shell("seq 4000 8000")))),
    )
    seen = await run("opencode", script, max_model_len=24_000, timeout=60)
    assert (seen.status, files(seen)) == (1, {"one.txt": "one\n", "two.txt": "two\n"})
    assert [call.status for call in seen.calls] == ["ok", "failed", "ok", "ok", "ok"]
    assert [finding.code for finding in seen.calls[1].findings] == ["context_length_exceeded"]
    assert branches(seen) == [("agent", 1, ""), ("compaction", 1, ""), ("agent", 2, "history_rewritten")]
    exact(seen)


@pytest.mark.parametrize("fault", ["http_500", "die"])
async def test_a_fault_of_the_engine_costs_one_call_and_no_branch(run: Run, fault: Fault) -> None:
    seen = await run("opencode", faulty(turns(*PROBE), at=1, fault=fault))
    assert (seen.status, files(seen)) == (0, FILES)
    assert [call.status for call in seen.calls] == ["ok", "failed", "ok", "ok"]
    assert branches(seen) == [("agent", 3, "")]
    exact(seen)


async def test_text_of_a_stream_that_broke_stays_in_its_history_so_the_next_turn_forks(run: Run) -> None:
    seen = await run("opencode", faulty(turns(PROBE[0]), at=0, fault="die"))
    assert (seen.status, files(seen)) == (0, {"hello.txt": "hello\n"})
    assert [call.status for call in seen.calls] == ["failed", "ok", "ok"]
    assert branches(seen) == [("agent", 1, ""), ("agent", 1, "history_rewritten")]
    exact(seen)


async def test_an_opencode_that_dies_in_mid_stream_stops_the_engine_at_once(run: Run) -> None:
    killer = Killer()
    seen = await run("opencode", slow, during=killer)
    check_stopped_at_once(seen, killer, within=0.3)  # the kernel takes its memory back before it closes its sockets
