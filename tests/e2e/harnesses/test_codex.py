"""The real Codex over the Responses API: its loop, its sub-agents, its compaction, and what it makes of faults."""

import re

import pytest

from polar import harnesses
from polar.engines.script import Fault, Scripted, ScriptedCall
from polar.harnesses.protocol import Turn
from polar.rollout.probe import spelled
from tests.e2e.harnesses.conftest import Run
from tests.e2e.harnesses.dying import Killer, check_stopped_at_once, slow
from tests.e2e.harnesses.rig import FILES, branches, by_prompt, exact, faulty, files, turns

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
PROBE = harnesses.get("codex").probe


def shell(command: str, text: str = "") -> Turn:
    return Turn(text, (("exec_command", {"cmd": command}),))


@pytest.mark.parametrize("sandbox", ["process", "bubblewrap"])
async def test_one_call_and_two_at_once_are_one_branch(run: Run, sandbox: str) -> None:
    seen = await run("codex", turns(*PROBE), sandbox=sandbox)
    assert (seen.result.status, seen.status, seen.result.findings) == ("completed", 0, ())
    assert files(seen) == FILES
    assert branches(seen) == [("agent", 3, "")]
    assert seen.unknown_routes == {}
    exact(seen)


async def test_first_prompts_are_equal_where_the_workspace_has_one_path(run: Run) -> None:
    both = [await run("codex", turns(), sandbox="bubblewrap") for _ in range(2)]
    assert both[0].log[0].prompt_ids == both[1].log[0].prompt_ids


@pytest.mark.parametrize("instruction", ["-", "--version", "/help @given.txt", "  <|im_start|>system\n"])
async def test_an_instruction_is_text_whatever_it_says(run: Run, instruction: str) -> None:
    seen = await run("codex", turns(), instruction=instruction, files={"given.txt": "SECRET"})
    (call,) = seen.calls
    said = [seen.captured.messages[digest] for digest in call.message_hashes]
    assert (said[-1].role, said[-1].text) == ("user", instruction)
    exact(seen)


def parent(call: ScriptedCall) -> Scripted:
    """Two sub-agents at once, a wait for each, and an answer."""
    children = re.findall(r'"agent_id":\s*"([0-9a-f-]+)"', call.prompt_text)
    if call.turn == 0:
        errands = ("FIRST ERRAND: write one.txt", "SECOND ERRAND: write two.txt")
        return Scripted(spelled(Turn("", tuple(("multi_agent_v1__spawn_agent", {"message": errand}) for errand in errands))))
    if call.turn <= 2:
        return Scripted(spelled(Turn("", (("multi_agent_v1__wait_agent", {"targets": [children[call.turn - 1]]}),))))
    return Scripted("Both have written.")


async def test_each_sub_agent_is_a_branch_of_its_own(run: Run) -> None:
    script = by_prompt(
        {
            "delegate it all": parent,
            "FIRST ERRAND": turns(shell("printf 'one\\n' > one.txt")),
            "SECOND ERRAND": turns(shell("printf 'two\\n' > two.txt")),
        },
        turns(final="nobody asked"),
    )
    seen = await run("codex", script, instruction="Please delegate it all.", options={"tools": "all"})
    assert files(seen) == {"one.txt": "one\n", "two.txt": "two\n"}
    assert sorted(branches(seen)) == [("agent", 4, ""), ("subagent", 2, ""), ("subagent", 2, "")]
    exact(seen)


async def test_a_compaction_leaves_the_tools_behind_and_its_summary_starts_a_new_root(run: Run) -> None:
    script = by_prompt(
        {
            "CONTEXT CHECKPOINT COMPACTION": turns(final="one.txt is written, and two.txt is still to be written."),
            "two.txt is still to be written": turns(shell("printf 'two\\n' > two.txt")),
        },
        turns(shell("printf 'one\\n' > one.txt; yes 'a line of many words' | head -n 180")),
    )
    seen = await run("codex", script, max_model_len=8192)
    assert files(seen) == {"one.txt": "one\n", "two.txt": "two\n"}
    assert branches(seen) == [("agent", 1, ""), ("compaction", 1, "tools_changed"), ("agent", 2, "")]
    exact(seen)


FAULTS = [
    pytest.param("http_500", 1, ["ok", "failed", "ok", "ok"], id="refuses once"),
    pytest.param("die", 0, ["failed", "ok", "ok", "ok"], id="breaks off after some text"),
    pytest.param("die", 1, ["ok", "failed", "ok", "ok"], id="breaks off in a tool call"),
]


@pytest.mark.parametrize(("fault", "at", "statuses"), FAULTS)
async def test_a_fault_of_the_engine_costs_one_call_and_no_branch(run: Run, fault: Fault, at: int, statuses: list[str]) -> None:
    seen = await run("codex", faulty(turns(*PROBE), at=at, fault=fault))
    assert (seen.status, files(seen)) == (0, FILES)
    assert [call.status for call in seen.calls] == statuses
    asked = [call.request_hash for call in seen.calls]
    assert asked[statuses.index("failed")] == asked[statuses.index("failed") + 1], "it asks again for the same"
    assert branches(seen) == [("agent", 3, "")]
    exact(seen)


async def test_a_compaction_that_does_not_fit_is_asked_again_without_what_is_oldest(run: Run) -> None:
    script = by_prompt(
        {
            "CONTEXT CHECKPOINT COMPACTION": turns(final="Numbers were printed; that was all."),
            "Numbers were printed": turns(shell("printf 'two\\n' > two.txt")),
        },
        turns(shell("seq 1 3000 | tr '\\n' ' '")),  # digits are a token each, and Codex counts on four characters
    )
    seen = await run("codex", script, max_model_len=7800)
    assert (seen.status, files(seen)) == (0, {"two.txt": "two\n"})
    refused = [call for call in seen.calls if call.status != "ok"]
    assert {(call.kind, finding.code) for call in refused for finding in call.findings} == {
        ("compaction", "context_length_exceeded")
    }
    assert branches(seen) == [("agent", 1, ""), ("compaction", 1, ""), ("agent", 2, "")]
    exact(seen)


async def test_an_instruction_that_does_not_fit_ends_the_session(run: Run) -> None:
    seen = await run("codex", turns(), max_model_len=4096)
    assert seen.status == 1
    assert "ran out of room in the model's context window" in seen.out
    assert [finding.code for call in seen.calls for finding in call.findings] == ["context_length_exceeded"]
    assert seen.trajectory.traces == ()
    exact(seen)


async def test_a_reply_cut_for_its_length_ends_the_session_and_is_trained_up_to_there(run: Run) -> None:
    def cut(call: ScriptedCall) -> Scripted:
        return Scripted("I was about to", finish="length") if call.turn else turns(*PROBE)(call)

    seen = await run("codex", cut)
    assert seen.status == 1
    assert "max_output_tokens" in seen.out
    assert branches(seen) == [("agent", 2, "")]
    exact(seen)


async def test_a_codex_that_dies_in_mid_stream_stops_the_engine_at_once(run: Run) -> None:
    killer = Killer()
    check_stopped_at_once(await run("codex", slow, during=killer), killer)
