"""The preset of Qwen Code, and the real Qwen Code."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.errors import UsageError
from polar.harnesses import slash
from polar.harnesses.protocol import Launch
from polar.sandboxes import Exit
from polar.specs import HarnessSpec, SamplingSpec, Task
from tests.harnesses.conftest import ENDPOINT, Start

QWEN = harnesses.get("qwen_code")
TASK = Task("t", "--version @file /help", harness=HarnessSpec("qwen_code"))
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]  # 155 MB


@pytest.fixture(scope="module", autouse=True)
def installed(cache_dir: Path) -> None:
    QWEN.install(cache_dir, print)
    assert QWEN.installed(cache_dir)


def launch(task: Task, cache: Path) -> Launch:
    return QWEN.launch(task, ENDPOINT, cache=cache, workspace="/workspace", home="/home/agent")


async def test_the_real_qwen_code_starts_in_the_sandbox(start: Start) -> None:
    ended, out, err = await start(TASK, ["--version"])
    assert (ended, out.strip()) == (Exit(0), "0.24.4"), err


def test_its_ripgrep_can_be_run(cache_dir: Path) -> None:
    programs = list(
        Path(launch(TASK, cache_dir).command.readable[0]).glob("node_modules/@qwen-code/qwen-code/vendor/ripgrep/*/rg")
    )
    assert programs
    assert all(os.access(program, os.X_OK) for program in programs)


def test_the_instruction_is_the_prompt_of_the_command_that_is_given(cache_dir: Path) -> None:
    made = launch(TASK, cache_dir)
    assert made.command.stdin == "/polar-instruction"
    assert made.home_files[".qwen/commands/polar-instruction.md"] == slash.markdown_command(TASK.instruction)
    assert TASK.instruction not in made.command.argv


def test_the_launch_says_all_that_qwen_code_must_know(cache_dir: Path) -> None:
    task = msgspec.structs.replace(TASK, sampling=SamplingSpec(max_tokens=512))
    made = launch(task, cache_dir)
    assert made.command.env["OPENAI_BASE_URL"] == "http://127.0.0.1:1/s/pk-test/v1"
    assert (made.command.env["OPENAI_API_KEY"], made.command.env["OPENAI_MODEL"]) == ("pk-test", "policy")
    assert made.command.env["QWEN_CODE_SYSTEM_SETTINGS_PATH"] == "/home/agent/qwen/settings.json"
    settings = json.loads(made.home_files["qwen/settings.json"])
    generation = settings["model"]["generationConfig"]
    assert generation["samplingParams"] == {"max_tokens": 512}
    # It compacts when 33,000 tokens of what it was told are free: a quarter of the real window.
    assert generation["contextWindowSize"] - 33_000 == 8192 - 2048
    assert settings["memory"] == {"enableManagedAutoMemory": False, "enableManagedAutoDream": False}
    assert not settings["telemetry"]["enabled"]


def test_qwen_code_has_no_options() -> None:
    with pytest.raises(UsageError, match="'qwen_code' has no option 'x'"):
        QWEN.check(HarnessSpec("qwen_code", {"x": ""}))
