"""The preset of gptme, and the real one."""

import json
from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.errors import UsageError
from polar.harnesses.protocol import shell_probe
from polar.sandboxes import Exit
from polar.specs import HarnessSpec, Task
from tests.e2e.harnesses.rig import run_harness, turns
from tests.harnesses.conftest import ENDPOINT, Start

GPTME = harnesses.get("gptme")
TASK = Task("t", "Do it.", harness=HarnessSpec("gptme"))


@pytest.fixture(scope="module")
def installed(cache_dir: Path) -> None:
    GPTME.install(cache_dir, print)
    assert GPTME.installed(cache_dir)


@pytest.mark.wide  # 260 MB
@pytest.mark.usefixtures("installed")
@pytest.mark.timeout(600)
async def test_the_real_gptme_starts_in_the_sandbox(start: Start) -> None:
    ended, out, err = await start(TASK, ["--version"])
    assert ended == Exit(0), err
    assert out.strip() == GPTME.version


@pytest.mark.wide
@pytest.mark.usefixtures("installed")
@pytest.mark.timeout(600)
async def test_a_second_call_in_one_reply_is_lost_and_forks_by_name(tmp_path: Path, smollm2_dir: Path) -> None:
    done = msgspec.structs.replace(shell_probe("shell")[2], calls=(("complete", {}),))
    seen = await run_harness("gptme", turns(*shell_probe("shell")[:2], done), tmp_path, smollm2_dir)
    assert (seen.workspace / "one.txt").exists()
    assert not (seen.workspace / "two.txt").exists()
    agent = [call for call in seen.calls if call.kind == "agent"]
    assert [call.fork_reason for call in agent] == ["", "", "history_rewritten"]
    assert agent[2].parent_call == agent[1].call_id
    assert [trace.call_ids for trace in seen.trajectory.traces if trace.branch.kind == "agent"] == [
        (agent[0].call_id, agent[1].call_id),
        (agent[2].call_id,),
    ]
    assert [call.kind for call in seen.calls].count("auxiliary") == 1, "it asks for a title"


@pytest.mark.parametrize(("instruction", "arrives"), [("Do it.", "Do it."), ("/help", "Task: /help"), ("-", "Task: -")])
def test_no_instruction_is_an_option_or_a_command(instruction: str, arrives: str, tmp_path: Path) -> None:
    task = msgspec.structs.replace(TASK, instruction=instruction)
    launch = GPTME.launch(task, ENDPOINT, cache=tmp_path, workspace="/workspace", home="/home/agent")
    assert launch.command.argv[-2:] == ("--", arrives)


def test_the_launch_says_all_that_gptme_must_know(tmp_path: Path) -> None:
    launch = GPTME.launch(TASK, ENDPOINT, cache=tmp_path, workspace="/workspace", home="/home/agent")
    assert "local/policy" in launch.command.argv
    told = launch.command.env
    assert (told["OPENAI_BASE_URL"], told["OPENAI_API_KEY"]) == ("http://127.0.0.1:1/s/pk-test/v1", "pk-test")
    assert told["GPTME_CONTEXT_LENGTH"] == "8192"
    assert told["GPTME_TIKTOKEN_TIMEOUT"] == "0"
    assert "pk-test" not in json.dumps(launch.command.argv)


def test_it_has_no_options() -> None:
    with pytest.raises(UsageError, match="has no option 'tools'"):
        GPTME.check(HarnessSpec("gptme", {"tools": "all"}))
