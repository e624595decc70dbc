"""The preset of Gemini CLI, and the real Gemini CLI."""

import json
import tomllib
from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.errors import UsageError
from polar.harnesses.protocol import Launch
from polar.sandboxes import Exit
from polar.specs import HarnessSpec, Task
from tests.harnesses.conftest import ENDPOINT, Start

GEMINI = harnesses.get("gemini_cli")
TASK = Task("t", "--version @file /help", harness=HarnessSpec("gemini_cli"))
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]  # 102 MB


@pytest.fixture(scope="module", autouse=True)
def installed(cache_dir: Path) -> None:
    GEMINI.install(cache_dir, print)
    assert GEMINI.installed(cache_dir)


def launch(model: str, cache: Path) -> Launch:
    endpoint = msgspec.structs.replace(ENDPOINT, model=model)
    return GEMINI.launch(TASK, endpoint, cache=cache, workspace="/workspace", home="/home/agent")


async def test_the_real_gemini_cli_starts_in_the_sandbox(start: Start) -> None:
    ended, out, err = await start(TASK, ["--version"])
    assert (ended, out.strip()) == (Exit(0), "0.61.0"), err


def test_the_launch_says_all_that_gemini_cli_must_know(cache_dir: Path) -> None:
    made = launch("policy", cache_dir)
    assert made.command.stdin == "/polar-instruction"
    assert tomllib.loads(made.home_files[".gemini/commands/polar-instruction.toml"]) == {"prompt": TASK.instruction}
    assert made.command.env["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:1/s/pk-test"
    assert made.command.env["GEMINI_API_KEY"] == "pk-test"
    settings = json.loads(made.home_files[".gemini/settings.json"])
    assert settings["security"]["auth"]["selectedType"] == "gemini-api-key"
    assert settings["model"]["compressionThreshold"] * 1_048_576 == 8192 - 2048, "a share of the window that it believes in"
    assert not settings["telemetry"]["enabled"]


def test_a_model_is_named_so_that_its_name_is_one_part_of_a_path(cache_dir: Path) -> None:
    argv = launch("/models/Qwen/Qwen3-8B", cache_dir).command.argv
    assert argv[argv.index("--model") + 1] == "Qwen3-8B"


def test_gemini_cli_has_no_options() -> None:
    with pytest.raises(UsageError, match="'gemini_cli' has no option 'x'"):
        GEMINI.check(HarnessSpec("gemini_cli", {"x": ""}))
