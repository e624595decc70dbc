"""The preset of mini-swe-agent, and the real one."""

from pathlib import Path

import msgspec
import pytest
import yaml

from polar import harnesses
from polar.errors import UsageError
from polar.sandboxes import Exit
from polar.specs import HarnessSpec, Task
from tests.harnesses.conftest import ENDPOINT, Start

TASK = Task("t", "-v do it", harness=HarnessSpec("mini_swe_agent"))


@pytest.mark.heavy
@pytest.mark.timeout(1800)
async def test_the_real_mini_swe_agent_starts_in_the_sandbox(start: Start, cache_dir: Path) -> None:
    harness = harnesses.get("mini_swe_agent")
    harness.install(cache_dir, print)
    assert harness.installed(cache_dir)
    ended, out, err = await start(TASK, ["--help"])
    assert ended == Exit(0), err
    assert "--exit-immediately" in out


@pytest.mark.parametrize(
    "instruction",
    ["plain", '-v {{x}} "q" \\ud83d \\n', "a\nb\n\tc\r\n", "é 😀 \u2028 \u0085 \x7f \ufeff \x01", "0", "null", "x" * 300_000],
)
def test_any_instruction_arrives_as_it_is(instruction: str, tmp_path: Path) -> None:
    task = msgspec.structs.replace(TASK, instruction=instruction)
    launch = harnesses.get("mini_swe_agent").launch(task, ENDPOINT, cache=tmp_path, workspace="/workspace", home="/home/agent")
    assert yaml.safe_load(launch.home_files["mini/task.yaml"])["run"]["task"] == instruction
    assert launch.command.argv[-1] == "../home/agent/mini/task.yaml"


def test_the_launch_says_all_that_it_must_know(tmp_path: Path) -> None:
    launch = harnesses.get("mini_swe_agent").launch(TASK, ENDPOINT, cache=tmp_path, workspace="/w", home="/h=1")
    assert "openai/policy" in launch.command.argv
    assert launch.command.env["OPENAI_API_BASE"] == "http://127.0.0.1:1/s/pk-test/v1"
    assert launch.command.env["OPENAI_API_KEY"] == "pk-test"
    with pytest.raises(UsageError, match="POLAR_CACHE"):
        harnesses.get("mini_swe_agent").launch(TASK, ENDPOINT, cache=tmp_path / "lr=1", workspace="/w", home="/h")
