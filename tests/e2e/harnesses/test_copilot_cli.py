"""The real Copilot CLI over its three APIs: its loop, its sub-agents, its compaction, and what it makes of faults."""

import pytest

from polar import harnesses
from polar.engines.script import Fault
from polar.harnesses.protocol import Turn
from tests.e2e.harnesses.conftest import Run
from tests.e2e.harnesses.dying import Killer, check_stopped_at_once, slow
from tests.e2e.harnesses.rig import FILES, branches, by_prompt, exact, faulty, files, turns

pytestmark = [pytest.mark.wide, pytest.mark.timeout(600)]
PROBE = harnesses.get("copilot_cli").probe
APIS = {"completions": "openai_chat", "responses": "openai_responses", "anthropic": "anthropic_messages"}
SUMMARY = "one.txt is written, and two.txt is still to be written"
LONG = "yes 'a line of many words' | head -n 600"


def run_shell(command: str) -> tuple[str, dict[str, object]]:
    return "bash", {"command": command, "description": "does it"}


def shell(command: str) -> Turn:
    return Turn("", (run_shell(command),))


def errand(name: str, prompt: str) -> tuple[str, dict[str, object]]:
    return "task", {
        "description": "an errand",
        "prompt": prompt,
        "agent_type": "general-purpose",
        "name": name,
        "mode": "sync",
    }


@pytest.mark.parametrize("sandbox", ["process", "bubblewrap"])
@pytest.mark.parametrize("api", APIS)
async def test_one_call_and_two_at_once_are_one_branch(run: Run, api: str, sandbox: str) -> None:
    seen = await run("copilot_cli", turns(*PROBE), options={"api": api}, sandbox=sandbox)
    assert (seen.result.status, seen.status, seen.result.findings) == ("completed", 0, ())
    assert files(seen) == FILES
    assert {call.dialect for call in seen.calls} == {APIS[api]}
    assert branches(seen) == [("agent", 3, "")]
    assert seen.unknown_routes == {}
    exact(seen)


@pytest.mark.parametrize("instruction", ["--version", "/help me", "!ls", "#12 @given.txt @./given.txt\n\n  end  \n"])
async def test_an_instruction_is_text_whatever_it_says(run: Run, instruction: str) -> None:
    seen = await run("copilot_cli", turns(), instruction=instruction, files={"given.txt": "SECRET"})
    (call,) = seen.calls
    said = [seen.captured.messages[digest] for digest in call.message_hashes]
    before, _, text = said[-1].text.partition("</current_datetime>\n\n")
    assert (said[-1].role, before.startswith("<current_datetime>"), text) == ("user", True, instruction.rstrip())
    exact(seen)


async def test_the_system_prompt_is_that_of_every_session_where_the_workspace_has_one_path(run: Run) -> None:
    both = [await run("copilot_cli", turns(), sandbox="bubblewrap") for _ in range(2)]
    assert both[0].calls[0].message_hashes[0] == both[1].calls[0].message_hashes[0]


@pytest.mark.parametrize("api", APIS)
async def test_each_sub_agent_is_a_branch_of_its_own(run: Run, api: str) -> None:
    errands = (errand("first", "FIRST ERRAND: write one.txt"), errand("second", "SECOND ERRAND: write two.txt"))
    script = by_prompt(
        {
            "delegate it all": turns(Turn("", errands)),
            "FIRST ERRAND": turns(shell("printf 'one\\n' > one.txt")),
            "SECOND ERRAND": turns(shell("printf 'two\\n' > two.txt")),
        },
        turns(final="nobody asked"),
    )
    seen = await run("copilot_cli", script, instruction="Please delegate it all.", options={"api": api})
    assert (seen.status, files(seen)) == (0, {"one.txt": "one\n", "two.txt": "two\n"})
    assert branches(seen) == [("agent", 2, ""), ("subagent", 2, ""), ("subagent", 2, "")]
    exact(seen)


@pytest.mark.parametrize("api", APIS)
async def test_a_compaction_leaves_the_tools_behind_and_its_summary_is_gone_on_from(run: Run, api: str) -> None:
    script = by_prompt(
        {
            "Please write the summary now": turns(final=SUMMARY),
            SUMMARY: turns(shell("printf 'two\\n' > two.txt")),
        },
        turns(shell(f"printf 'one\\n' > one.txt; {LONG}"), shell(LONG), shell(LONG)),
    )
    seen = await run("copilot_cli", script, options={"api": api}, max_model_len=32_000)
    assert (seen.status, files(seen)) == (0, {"one.txt": "one\n", "two.txt": "two\n"})
    assert branches(seen) == [("agent", 3, ""), ("compaction", 1, "tools_changed"), ("agent", 2, "history_rewritten")]
    exact(seen)


@pytest.mark.parametrize(("fault", "at"), [("http_500", 1), ("die", 1), ("die", 0)])
@pytest.mark.parametrize("api", APIS)
async def test_a_fault_of_the_engine_costs_one_call_and_no_branch(run: Run, api: str, fault: Fault, at: int) -> None:
    seen = await run("copilot_cli", faulty(turns(*PROBE), at=at, fault=fault), options={"api": api})
    assert (seen.status, files(seen)) == (0, FILES)
    assert [call.ordinal for call in seen.calls if call.status == "failed"] == [seen.calls[at].ordinal]
    assert branches(seen) == [("agent", 3, "")]
    exact(seen)


async def test_a_copilot_that_dies_in_mid_stream_stops_the_engine_at_once(run: Run) -> None:
    killer = Killer()
    seen = await run("copilot_cli", slow, during=killer)
    check_stopped_at_once(seen, killer, within=0.3)  # the kernel takes its memory back before it closes its sockets
