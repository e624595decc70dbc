"""The preset of Continue CLI, and the real Continue CLI."""

import json
from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.errors import UsageError
from polar.harnesses import node
from polar.harnesses.node import Node
from polar.harnesses.protocol import Launch
from polar.sandboxes import Exit
from polar.specs import HarnessSpec, SamplingSpec, Task
from tests.harnesses.conftest import ENDPOINT, Start

CONTINUE = harnesses.get("continue_cli")
TASK = Task("t", "--version @file /help", harness=HarnessSpec("continue_cli"))


@pytest.fixture(scope="module")
def installed(cache_dir: Path) -> None:
    CONTINUE.install(cache_dir, print)
    assert CONTINUE.installed(cache_dir)


@pytest.fixture
def some_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "find", lambda _: Node(Path("/usr/bin/node"), Path("/npm-cli.js"), ()))


def launch(task: Task, cache: Path) -> Launch:
    return CONTINUE.launch(task, ENDPOINT, cache=cache, workspace="/workspace", home="/home/agent")


@pytest.mark.wide  # 83 MB
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("installed")
async def test_the_real_continue_starts_in_the_sandbox(start: Start) -> None:
    ended, out, err = await start(TASK, ["--version"])
    assert (ended, out.strip()) == (Exit(0), "1.5.47"), err


@pytest.mark.usefixtures("some_node")
def test_the_launch_says_all_that_continue_must_know(tmp_path: Path) -> None:
    made = launch(TASK, tmp_path)
    assert made.command.stdin == TASK.instruction
    assert made.command.argv[-4:] == ("--print", "--auto", "--config", "/home/agent/continue/config.yaml")
    assert made.command.env["CONTINUE_GLOBAL_DIR"] == "/home/agent/continue"
    assert made.command.env["CONTINUE_METRICS_ENABLED"] == made.command.env["CONTINUE_CLI_ENABLE_TELEMETRY"] == "0"
    (model,) = json.loads(made.home_files["continue/config.yaml"])["models"]
    assert (model["provider"], model["model"]) == ("openai", "policy")
    assert (model["apiBase"], model["apiKey"]) == ("http://127.0.0.1:1/s/pk-test/v1", "pk-test")


@pytest.mark.usefixtures("some_node")
@pytest.mark.parametrize(("asked", "told"), [(None, 2048), (512, 512), (8192, 2048)])
def test_the_window_is_the_policys_and_replies_leave_most_of_it_to_the_prompt(
    asked: int | None, told: int, tmp_path: Path
) -> None:
    task = msgspec.structs.replace(TASK, sampling=SamplingSpec(max_tokens=asked))
    (model,) = json.loads(launch(task, tmp_path).home_files["continue/config.yaml"])["models"]
    assert model["defaultCompletionOptions"] == {"contextLength": 8192, "maxTokens": told}


@pytest.mark.usefixtures("some_node")
@pytest.mark.parametrize(
    ("instruction", "told"),
    [("/compact", "Task: /compact"), (" /compact\n", "Task:  /compact\n"), ("/compact it", "/compact it")],
)
def test_the_one_command_is_text_too(instruction: str, told: str, tmp_path: Path) -> None:
    assert launch(msgspec.structs.replace(TASK, instruction=instruction), tmp_path).command.stdin == told


def test_continue_has_no_options() -> None:
    with pytest.raises(UsageError, match="'continue_cli' has no option 'x'"):
        CONTINUE.check(HarnessSpec("continue_cli", {"x": ""}))
