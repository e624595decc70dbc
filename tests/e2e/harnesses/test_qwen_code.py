"""The real Qwen Code: its loop, its sub-agents, its compaction, and what it makes of faults."""

import pytest

from polar import harnesses
from polar.engines.script import Fault
from polar.harnesses.protocol import Turn
from tests.e2e.harnesses.conftest import Run
from tests.e2e.harnesses.dying import Killer, check_stopped_at_once, slow
from tests.e2e.harnesses.rig import FILES, branches, by_prompt, exact, faulty, files, turns

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
PROBE = harnesses.get("qwen_code").probe
SUMMARY = "<analysis>x</analysis>\n<state_snapshot>\none.txt is written, and two.txt is still to be written\n</state_snapshot>"


def shell(command: str, text: str = "") -> Turn:
    return Turn(text, (("run_shell_command", {"command": command, "is_background": False}),))


def errand(prompt: str) -> tuple[str, dict[str, object]]:
    return "agent", {"description": "an errand", "prompt": prompt, "subagent_type": "general-purpose"}


@pytest.mark.parametrize("sandbox", ["process", "bubblewrap"])
async def test_one_call_and_two_at_once_are_one_branch(run: Run, sandbox: str) -> None:
    seen = await run("qwen_code", turns(*PROBE), sandbox=sandbox)
    assert (seen.result.status, seen.status, seen.result.findings) == ("completed", 0, ())
    assert files(seen) == FILES
    assert branches(seen) == [("agent", 3, "")]
    assert seen.unknown_routes == {}
    exact(seen)


async def test_first_prompts_are_equal_where_the_workspace_has_one_path(run: Run) -> None:
    both = [await run("qwen_code", turns(), sandbox="bubblewrap") for _ in range(2)]
    assert both[0].log[0].prompt_ids == both[1].log[0].prompt_ids


MENTIONS = "look at @given.txt, \\@given.txt and @{given.txt}"
SIGNS = "!{ls} {{args}} $& $$ $ARGUMENTS\n\n  end"


@pytest.mark.parametrize("instruction", ["--version", "/help me", MENTIONS, SIGNS])
async def test_an_instruction_is_text_whatever_it_says(run: Run, instruction: str) -> None:
    seen = await run("qwen_code", turns(), instruction=instruction, files={"given.txt": "SECRET"})
    (call,) = seen.calls
    said = [seen.captured.messages[digest] for digest in call.message_hashes]
    assert (said[-1].role, said[-1].content[-1].text) == ("user", instruction)
    assert "SECRET" not in said[-1].text
    assert "polar-instruction" not in said[-1].text, "the model is not told of the command that it came by"
    exact(seen)


async def test_each_sub_agent_is_a_branch_of_its_own_and_the_parent_goes_on_meanwhile(run: Run) -> None:
    script = by_prompt(
        {
            "delegate it all": turns(
                Turn("", (errand("FIRST ERRAND: write one.txt"), errand("SECOND ERRAND: write two.txt"))),
                Turn("I wait for them."),
            ),
            "FIRST ERRAND": turns(shell("printf 'one\\n' > one.txt")),
            "SECOND ERRAND": turns(shell("printf 'two\\n' > two.txt")),
        },
        turns(final="nobody asked"),
    )
    seen = await run("qwen_code", script, instruction="Please delegate it all.")
    assert (seen.status, files(seen)) == (0, {"one.txt": "one\n", "two.txt": "two\n"})
    parent, *children = branches(seen)
    assert parent[0] == "agent"
    assert parent[1] in (3, 4), "it hears of its errands in one turn, or in two"
    assert parent[2] == ""
    assert children == [("subagent", 2, "")] * 2
    exact(seen)


async def test_a_compaction_leaves_the_tools_behind_and_its_summary_is_gone_on_from(run: Run) -> None:
    script = by_prompt(
        {
            "You are the component that summarizes": turns(final=SUMMARY),
            "two.txt is still to be written": turns(shell("true"), shell("true"), shell("printf 'two\\n' > two.txt")),
        },
        turns(shell("printf 'one\\n' > one.txt; seq 1 4000"), shell("seq 1 3000")),
    )
    seen = await run("qwen_code", script, max_model_len=48_000)
    assert (seen.status, files(seen)) == (0, {"one.txt": "one\n", "two.txt": "two\n"})
    assert [call.status for call in seen.calls[:4]] == ["ok", "ok", "failed", "ok"], (
        "with the tools, it is too long to be summarised"
    )
    assert [finding.code for finding in seen.calls[2].findings] == ["context_length_exceeded"]
    assert branches(seen) == [
        ("agent", 2, ""),
        ("compaction", 1, "tools_changed"),
        ("agent", 1, "history_rewritten"),
        ("agent", 3, "history_rewritten"),  # one turn late, Qwen Code puts its reminders before the summary
    ]
    exact(seen)


@pytest.mark.parametrize("fault", ["http_500", "die"])
async def test_a_fault_of_the_engine_costs_one_call_and_no_branch(run: Run, fault: Fault) -> None:
    seen = await run("qwen_code", faulty(turns(*PROBE), at=1, fault=fault))
    assert (seen.status, files(seen)) == (0, FILES)
    assert [call.status for call in seen.calls] == ["ok", "failed", "ok", "ok"]
    assert branches(seen) == [("agent", 3, "")]
    exact(seen)


async def test_a_stream_that_breaks_after_some_text_is_the_end_of_qwen_code_and_no_reward(run: Run) -> None:
    seen = await run("qwen_code", faulty(turns(*PROBE), at=0, fault="die"))
    assert (seen.status, seen.result.status, seen.result.error_kind) == (1, "failed", "EngineError")
    assert [call.status for call in seen.calls] == ["failed"]
    assert seen.trajectory.traces == ()
    exact(seen)


async def test_a_prompt_that_never_fits_ends_the_session(run: Run) -> None:
    seen = await run("qwen_code", turns(), max_model_len=8192)
    assert seen.result.error_kind == "context_length_exceeded"
    assert {call.status for call in seen.calls} == {"failed"}
    exact(seen)


async def test_a_qwen_code_that_dies_in_mid_stream_stops_the_engine_at_once(run: Run) -> None:
    killer = Killer()
    check_stopped_at_once(await run("qwen_code", slow, during=killer), killer)
