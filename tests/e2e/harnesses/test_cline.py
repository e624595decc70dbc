"""The real Cline CLI: its loop, its sub-agents, its compaction, and what it makes of faults."""

import pytest

from polar import harnesses
from polar.engines.script import Fault
from polar.harnesses.protocol import Turn
from tests.e2e.harnesses.conftest import Run
from tests.e2e.harnesses.dying import Killer, check_stopped_at_once, slow
from tests.e2e.harnesses.rig import FILES, branches, by_prompt, exact, faulty, files, turns

pytestmark = [pytest.mark.wide, pytest.mark.timeout(600)]
PROBE = harnesses.get("cline").probe
SUMMARY = "one.txt is written, and two.txt is still to be written"
LONG = "yes 'a line of many words' | head -n 400"


def run_shell(command: str) -> tuple[str, dict[str, object]]:
    return "run_commands", {"commands": [command]}


def shell(command: str) -> Turn:
    return Turn("", (run_shell(command),))


def errand(prompt: str) -> tuple[str, dict[str, object]]:
    return "spawn_agent", {"systemPrompt": "You write files.", "task": prompt}


@pytest.mark.parametrize("sandbox", ["process", "bubblewrap"])
async def test_one_call_and_two_at_once_are_one_branch(run: Run, sandbox: str) -> None:
    seen = await run("cline", turns(*PROBE), sandbox=sandbox)
    assert (seen.result.status, seen.status, seen.result.findings) == ("completed", 0, ())
    assert files(seen) == FILES
    assert branches(seen) == [("agent", 3, "")]
    assert seen.unknown_routes == {}
    exact(seen)


@pytest.mark.parametrize(
    ("instruction", "told"),
    [
        ("--version of it", "--version of it"),
        ("  look at @missing.txt, #12 and !ls\n\n  end  \n", "look at @missing.txt, #12 and !ls\n\n  end"),
        ("/team of two", "Task: /team of two"),  # else a command
        ("version", "Task: version"),  # else a command
    ],
)
async def test_an_instruction_is_text_whatever_it_says(run: Run, instruction: str, told: str) -> None:
    seen = await run("cline", turns(), instruction=instruction)
    (call,) = seen.calls
    said = [seen.captured.messages[digest] for digest in call.message_hashes]
    assert (said[-1].role, said[-1].text) == ("user", told)
    exact(seen)


async def test_first_prompts_are_equal_where_the_workspace_has_one_path(run: Run) -> None:
    both = [await run("cline", turns(), sandbox="bubblewrap") for _ in range(2)]
    assert both[0].log[0].prompt_ids == both[1].log[0].prompt_ids


async def test_each_sub_agent_is_a_branch_of_its_own(run: Run) -> None:
    script = by_prompt(
        {
            "delegate it all": turns(Turn("", (errand("FIRST ERRAND: write one.txt"), errand("SECOND ERRAND: write two.txt")))),
            "FIRST ERRAND": turns(shell("printf 'one\\n' > one.txt")),
            "SECOND ERRAND": turns(shell("printf 'two\\n' > two.txt")),
        },
        turns(final="nobody asked"),
    )
    seen = await run("cline", script, instruction="Please delegate it all.")
    assert (seen.status, files(seen)) == (0, {"one.txt": "one\n", "two.txt": "two\n"})
    assert branches(seen) == [("agent", 2, ""), ("subagent", 2, ""), ("subagent", 2, "")]
    exact(seen)


async def test_a_compaction_is_a_request_of_its_own_and_its_summary_is_gone_on_from(run: Run) -> None:
    script = by_prompt(
        {
            "Summarize this session for continuation": turns(final=SUMMARY),
            SUMMARY: turns(shell("printf 'two\\n' > two.txt")),
        },
        turns(shell(f"printf 'one\\n' > one.txt; {LONG}"), shell(LONG), shell(LONG)),
    )
    seen = await run("cline", script, max_model_len=16_384)
    assert (seen.status, files(seen)) == (0, {"one.txt": "one\n", "two.txt": "two\n"})
    assert branches(seen) == [("agent", 3, ""), ("compaction", 1, ""), ("agent", 2, "history_rewritten")]
    exact(seen)


@pytest.mark.parametrize("fault", ["http_500", "die"])
async def test_a_fault_of_the_engine_costs_one_call_and_no_branch(run: Run, fault: Fault) -> None:
    seen = await run("cline", faulty(turns(*PROBE), at=1, fault=fault))
    assert (seen.status, files(seen)) == (0, FILES)
    assert [call.status for call in seen.calls] == ["ok", "failed", "ok", "ok"]
    assert branches(seen) == [("agent", 3, "")]
    exact(seen)


async def test_a_stream_that_breaks_after_some_text_is_the_end_of_cline_and_no_reward(run: Run) -> None:
    seen = await run("cline", faulty(turns(*PROBE), at=0, fault="die"))
    assert (seen.status, seen.result.status, seen.result.error_kind) == (1, "failed", "EngineError")
    assert [call.status for call in seen.calls] == ["failed"]
    assert seen.trajectory.traces == ()
    exact(seen)


@pytest.mark.parametrize(("times", "answered"), [(4, True), (5, False)])
async def test_the_same_call_five_times_in_a_row_ends_the_run(run: Run, times: int, answered: bool) -> None:
    seen = await run("cline", turns(*[shell("true")] * times, final="It is true."))
    assert (seen.status, seen.result.status) == (0, "completed")
    assert len(seen.calls) == times + answered
    assert branches(seen) == [("agent", times + answered, "")]
    exact(seen)


async def test_a_prompt_that_never_fits_ends_the_session(run: Run) -> None:
    seen = await run("cline", turns(), max_model_len=4096)
    assert (seen.status, seen.result.error_kind) == (1, "context_length_exceeded")
    assert {call.status for call in seen.calls} == {"failed"}
    exact(seen)


async def test_a_cline_that_dies_in_mid_stream_stops_the_engine_at_once(run: Run) -> None:
    killer = Killer()
    seen = await run("cline", slow, during=killer)
    check_stopped_at_once(seen, killer, within=0.3)  # the kernel takes its memory back before it closes its sockets
