"""The preset of OpenHands, and the real one."""

import json
from pathlib import Path

import pytest

from polar import harnesses
from polar.errors import UsageError
from polar.sandboxes import Exit
from polar.specs import HarnessSpec, Task
from tests.harnesses.conftest import ENDPOINT, Start

OPENHANDS = harnesses.get("openhands")
TASK = Task("t", "--version", harness=HarnessSpec("openhands"))


@pytest.mark.wide  # 780 MB
@pytest.mark.timeout(1800)
async def test_the_real_openhands_starts_in_the_sandbox(start: Start, cache_dir: Path) -> None:
    OPENHANDS.install(cache_dir, print)
    assert OPENHANDS.installed(cache_dir)
    ended, out, err = await start(TASK, ["--version"])
    assert ended == Exit(0), err
    assert f"CLI {OPENHANDS.version}" in out


def test_the_instruction_is_the_value_of_an_option(tmp_path: Path) -> None:
    launch = OPENHANDS.launch(TASK, ENDPOINT, cache=tmp_path, workspace="/workspace", home="/home/agent")
    assert launch.command.argv[-1] == "--task=--version"


def test_the_launch_says_all_that_openhands_must_know(tmp_path: Path) -> None:
    launch = OPENHANDS.launch(TASK, ENDPOINT, cache=tmp_path, workspace="/workspace", home="/home/agent")
    assert launch.command.env["OPENHANDS_PERSISTENCE_DIR"] == "/home/agent/.openhands"
    agent = json.loads(launch.home_files[".openhands/agent_settings.json"])
    for llm in (agent["llm"], agent["condenser"]["llm"]):
        assert (llm["model"], llm["max_input_tokens"]) == ("openai/policy", 8192)
        assert (llm["base_url"], llm["api_key"]) == ("http://127.0.0.1:1/s/pk-test/v1", "pk-test")
    assert "pk-test" not in json.dumps(launch.command.argv)


def test_it_has_no_options() -> None:
    with pytest.raises(UsageError, match="has no option 'tools'"):
        OPENHANDS.check(HarnessSpec("openhands", {"tools": "all"}))
