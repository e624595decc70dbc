"""The preset of aider, and the real one."""

import json
from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.errors import UsageError
from polar.harnesses.protocol import Turn
from polar.sandboxes import Exit
from polar.specs import HarnessSpec, Task
from tests.e2e.harnesses.rig import run_harness, turns
from tests.harnesses.conftest import ENDPOINT, Start

AIDER = harnesses.get("aider")
TASK = Task("t", "Do it.", harness=HarnessSpec("aider"))


@pytest.fixture(scope="module")
def installed(cache_dir: Path) -> None:
    AIDER.install(cache_dir, print)
    assert AIDER.installed(cache_dir)


@pytest.mark.wide  # 690 MB
@pytest.mark.usefixtures("installed")
@pytest.mark.timeout(600)
async def test_the_real_aider_starts_in_the_sandbox(start: Start) -> None:
    ended, out, err = await start(TASK, ["--version"])
    assert ended == Exit(0), err
    assert out.split() == ["aider", AIDER.version]


@pytest.mark.wide
@pytest.mark.usefixtures("installed")
@pytest.mark.timeout(600)
async def test_only_the_files_that_the_policy_wrote_are_new(tmp_path: Path, smollm2_dir: Path) -> None:
    edit = Turn("It says so now.\n\na.txt\n```\nnew\n```\n")
    seen = await run_harness("aider", turns(edit), tmp_path, smollm2_dir, instruction="!ls a.txt", files={"a.txt": "old\n"})
    assert {path.name: path.read_text() for path in seen.workspace.iterdir()} == {"a.txt": "new\n"}
    assert [call.kind for call in seen.calls] == ["agent"]


@pytest.mark.parametrize(("instruction", "arrives"), [("Do it.", "Do it."), ("/exit", "Task: /exit"), ("!ls", "Task: !ls")])
def test_no_instruction_is_a_command(instruction: str, arrives: str, tmp_path: Path) -> None:
    task = msgspec.structs.replace(TASK, instruction=instruction)
    launch = AIDER.launch(task, ENDPOINT, cache=tmp_path, workspace="/workspace", home="/home/agent")
    assert launch.home_files["aider/task.txt"] == arrives
    assert "/home/agent/aider/task.txt" in launch.command.argv


def test_the_launch_says_all_that_aider_must_know(tmp_path: Path) -> None:
    launch = AIDER.launch(TASK, ENDPOINT, cache=tmp_path, workspace="/workspace", home="/home/agent")
    assert "openai/policy" in launch.command.argv
    told = launch.command.env
    assert (told["OPENAI_API_BASE"], told["OPENAI_API_KEY"]) == ("http://127.0.0.1:1/s/pk-test/v1", "pk-test")
    assert json.loads(launch.home_files["aider/models.json"])["openai/policy"]["max_input_tokens"] == 8192
    assert "pk-test" not in json.dumps(launch.command.argv)


def test_it_has_no_options() -> None:
    with pytest.raises(UsageError, match="has no option 'tools'"):
        AIDER.check(HarnessSpec("aider", {"tools": "all"}))
