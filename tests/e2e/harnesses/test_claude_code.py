"""The real Claude Code over the Messages API: its loop, its sub-agents, its compaction, and what it makes of faults."""

from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.engines.script import Fault, Scripted, ScriptedCall
from polar.harnesses.claude_code import ClaudeCode
from polar.harnesses.protocol import Endpoint, Launch, Turn
from polar.rollout.probe import Script
from polar.specs import Task
from tests.e2e.harnesses.conftest import Run
from tests.e2e.harnesses.dying import Killer, check_stopped_at_once, slow
from tests.e2e.harnesses.rig import FILES, branches, by_prompt, exact, faulty, files, turns

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
PROBE = harnesses.get("claude_code").probe


def shell(command: str, text: str = "") -> Turn:
    return Turn(text, (("Bash", {"description": "Write", "command": command}),))


@pytest.mark.parametrize("sandbox", ["process", "bubblewrap"])
@pytest.mark.parametrize("tools", ["bare", "default"])
async def test_one_call_and_two_at_once_are_one_branch(run: Run, sandbox: str, tools: str) -> None:
    seen = await run("claude_code", turns(*PROBE), sandbox=sandbox, options={"tools": tools})
    assert (seen.result.status, seen.status) == ("completed", 0)
    assert files(seen) == FILES
    assert branches(seen) == [("agent", 3, "")]
    assert seen.unknown_routes == {}
    exact(seen)


async def test_first_prompts_are_equal_where_the_workspace_has_one_path(run: Run) -> None:
    both = [await run("claude_code", turns(), sandbox="bubblewrap") for _ in range(2)]
    assert both[0].log[0].prompt_ids == both[1].log[0].prompt_ids


class StartedByHand(ClaudeCode):
    """Claude Code as somebody starts it who leaves the attribution header on."""

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        launch = super().launch(task, endpoint, cache=cache, workspace=workspace, home=home)
        env = {name: value for name, value in launch.command.env.items() if name != "CLAUDE_CODE_ATTRIBUTION_HEADER"}
        return msgspec.structs.replace(launch, command=msgspec.structs.replace(launch.command, env=env))


async def test_the_policy_never_sees_an_attribution_header(run: Run) -> None:
    launched = await run("claude_code", turns(), sandbox="bubblewrap")
    by_hand = await run(f"{__name__}:StartedByHand", turns(), sandbox="bubblewrap")
    assert (launched.calls[0].normalisers, by_hand.calls[0].normalisers) == (
        ("cache_control",),
        ("cache_control", "claude_code_attribution"),
    )
    assert launched.log[0].prompt_ids == by_hand.log[0].prompt_ids
    exact(by_hand)


@pytest.mark.parametrize(
    ("instruction", "tools", "told"),
    [
        ("--version", "bare", "--version"),
        ("/help me", "bare", "\n/help me"),
        ("/compact", "default", "\n/compact"),
        ("Read @given.txt.", "bare", "Read @given.txt."),
        ("Read @given.txt.", "default", "Read @given.txt."),
        ("<|im_start|>system", "bare", "<|im_start|>system"),
    ],
)
async def test_an_instruction_is_text_whatever_it_says(run: Run, instruction: str, tools: str, told: str) -> None:
    seen = await run(
        "claude_code", turns(), instruction=instruction, options={"tools": tools}, files={"given.txt": "not to be pasted"}
    )
    (call,) = seen.calls
    said = [seen.captured.messages[digest] for digest in call.message_hashes]
    (user,) = [message for message in said if message.role == "user"]
    assert user.text.endswith(told)
    assert not any("not to be pasted" in message.text for message in said)
    exact(seen)


def delegating() -> Script:
    """A parent that sends two sub-agents at once, and answers when it hears of them."""
    errands: list[tuple[str, dict[str, object]]] = [
        ("Agent", {"description": name, "prompt": f"{name} ERRAND: write a file", "subagent_type": "general-purpose"})
        for name in ("FIRST", "SECOND")
    ]
    scripts = {
        "delegate it all": turns(Turn("", tuple(errands)), final="Both have written."),
        "FIRST ERRAND": turns(shell("printf 'one\\n' > one.txt")),
        "SECOND ERRAND": turns(shell("printf 'two\\n' > two.txt")),
    }
    return by_prompt(scripts, turns(final="nobody asked"))


async def test_each_sub_agent_is_a_branch_of_its_own_and_the_parent_waits(run: Run) -> None:
    seen = await run("claude_code", delegating(), instruction="Please delegate it all.", options={"tools": "default"})
    assert files(seen) == {"one.txt": "one\n", "two.txt": "two\n"}
    assert sorted(branches(seen)) == [("agent", 2, ""), ("subagent", 2, ""), ("subagent", 2, "")]
    exact(seen)


async def test_sub_agents_in_the_background_wake_their_parent(run: Run) -> None:
    options = {"tools": "default", "background": "on"}
    seen = await run("claude_code", delegating(), instruction="Please delegate it all.", options=options)
    assert files(seen) == {"one.txt": "one\n", "two.txt": "two\n"}
    found = branches(seen)
    assert [branch for branch in found if branch[0] == "subagent"] == [("subagent", 2, "")] * 2
    (agent,) = [branch for branch in found if branch[0] != "subagent"]
    assert agent[1] >= 3, "it answered before its children did, and once more"
    exact(seen)


async def test_a_compaction_goes_on_from_the_history_and_its_summary_starts_a_new_root(run: Run) -> None:
    summary = "<analysis>Short.</analysis>\n<summary>one.txt is written, and two.txt is still to be written.</summary>"
    script = by_prompt(
        {
            "CRITICAL: Respond with TEXT ONLY": turns(final=summary),
            "two.txt is still to be written": turns(shell("printf 'two\\n' > two.txt")),
        },
        turns(shell("printf 'one\\n' > one.txt"), *[shell("yes 'a line of many words' | head -n 230")] * 5),
    )
    seen = await run("claude_code", script, max_model_len=10_240)
    assert files(seen) == {"one.txt": "one\n", "two.txt": "two\n"}
    assert branches(seen) == [("agent", 6, ""), ("compaction", 1, ""), ("agent", 2, "history_rewritten")]
    exact(seen)


FAULTS = [
    pytest.param("http_500", 1, ["ok", "failed", "ok", "ok"], id="refuses once"),
    pytest.param("die", 0, ["failed", "ok", "ok", "ok"], id="breaks off after some text"),
    pytest.param("die", 1, ["ok", "failed", "ok", "ok"], id="breaks off in a tool call"),
]


@pytest.mark.parametrize(("fault", "at", "statuses"), FAULTS)
async def test_a_fault_of_the_engine_costs_one_call_and_no_branch(run: Run, fault: Fault, at: int, statuses: list[str]) -> None:
    seen = await run("claude_code", faulty(turns(*PROBE), at=at, fault=fault))
    assert (seen.status, files(seen)) == (0, FILES)
    assert [call.status for call in seen.calls] == statuses
    asked = [call.request_hash for call in seen.calls]
    assert asked[statuses.index("failed")] == asked[statuses.index("failed") + 1], "it asks again for the same"
    assert branches(seen) == [("agent", 3, "")]
    exact(seen)


async def test_an_instruction_that_does_not_fit_ends_the_session(run: Run) -> None:
    seen = await run("claude_code", turns(), instruction="many words " * 2000, max_model_len=4096)
    assert seen.status == 1
    assert {finding.code for call in seen.calls for finding in call.findings} == {"context_length_exceeded"}
    assert seen.trajectory.traces == ()
    exact(seen)


async def test_a_claude_code_that_dies_in_mid_stream_stops_the_engine_at_once(run: Run) -> None:
    killer = Killer()
    check_stopped_at_once(await run("claude_code", slow, during=killer), killer)


async def test_a_history_that_does_not_fit_is_compacted_and_goes_on(run: Run) -> None:
    summary = "<summary>Numbers were printed, and two.txt is still to be written.</summary>"
    script = by_prompt(
        {
            "CRITICAL: Respond with TEXT ONLY": turns(final=summary),
            "two.txt is still to be written": turns(shell("printf 'two\\n' > two.txt")),
        },
        # Digits are a token each, and Claude Code counts on four characters.
        turns(shell("seq 1 1300 | tr '\\n' ' '"), shell("seq 1 1400 | tr '\\n' ' '")),
    )
    seen = await run("claude_code", script, max_model_len=12_000)
    assert (seen.status, files(seen)) == (0, {"two.txt": "two\n"})
    assert [finding.code for call in seen.calls for finding in call.findings] == ["context_length_exceeded"]
    assert branches(seen) == [("agent", 2, ""), ("compaction", 1, ""), ("agent", 2, "history_rewritten")]
    exact(seen)


async def test_what_a_tool_prints_beyond_a_share_of_the_window_is_put_into_a_file(run: Run) -> None:
    seen = await run("claude_code", turns(shell("seq 1 1000")), max_model_len=7000)
    told = seen.captured.messages[seen.calls[1].message_hashes[-1]].text
    assert told.startswith("<persisted-output>\nOutput too large (3.8KB).")
    exact(seen)


async def test_a_reply_cut_for_its_length_is_continued(run: Run) -> None:
    def cut(call: ScriptedCall) -> Scripted:
        return Scripted("I was about to", finish="length") if call.turn < 2 else Scripted(" say it.")

    seen = await run("claude_code", cut)
    assert branches(seen) == [("agent", 3, "")]
    exact(seen)
