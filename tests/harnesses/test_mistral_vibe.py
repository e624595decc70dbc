"""The preset of Mistral Vibe, and the real one."""

import json
import tomllib
from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.errors import UsageError
from polar.sandboxes import Exit
from polar.specs import HarnessSpec, Task
from tests.harnesses.conftest import ENDPOINT, Start

VIBE = harnesses.get("mistral_vibe")
TASK = Task("t", "/help", harness=HarnessSpec("mistral_vibe"))


@pytest.mark.wide  # 400 MB
@pytest.mark.timeout(1800)
async def test_the_real_vibe_starts_in_the_sandbox(start: Start, cache_dir: Path) -> None:
    VIBE.install(cache_dir, print)
    assert VIBE.installed(cache_dir)
    ended, out, err = await start(TASK, ["--version"])
    assert (ended, out.split()[-1]) == (Exit(0), VIBE.version), err


@pytest.mark.parametrize("instruction", ["/help", "-v", "é 😀 \u2028 \x01\r\n", "x" * 300_000])
def test_any_instruction_arrives_as_it_is(instruction: str, tmp_path: Path) -> None:
    task = msgspec.structs.replace(TASK, instruction=instruction)
    launch = VIBE.launch(task, ENDPOINT, cache=tmp_path, workspace="/workspace", home="/home/agent")
    assert launch.command.argv[-2:] == ("--prompt-file", "/home/agent/vibe/task.txt")
    assert launch.home_files["vibe/task.txt"] == instruction


def test_the_launch_says_all_that_vibe_must_know(tmp_path: Path) -> None:
    launch = VIBE.launch(TASK, ENDPOINT, cache=tmp_path, workspace="/workspace", home="/home/agent")
    assert launch.command.env["VIBE_HOME"] == "/home/agent/vibe"
    told = tomllib.loads(launch.home_files["vibe/config.toml"])
    (provider,), (model,) = told["providers"], told["models"]
    assert (provider["api_base"], provider["backend"]) == ("http://127.0.0.1:1/s/pk-test/v1", "generic")
    assert launch.command.env[provider["api_key_env_var"]] == "pk-test"
    assert (model["name"], model["provider"], model["max_context_length"]) == ("policy", provider["name"], 8192)
    assert told["active_model"] == model["alias"]
    assert "pk-test" not in json.dumps(launch.command.argv)


def test_it_is_told_to_be_quiet(tmp_path: Path) -> None:
    launch = VIBE.launch(TASK, ENDPOINT, cache=tmp_path, workspace="/workspace", home="/home/agent")
    told = tomllib.loads(launch.home_files["vibe/config.toml"])
    quiet = ("enable_telemetry", "enable_update_checks", "enable_auto_update", "enable_notifications", "enable_connectors")
    assert [name for name in quiet if told[name] is not False] == []
    assert (told["experiments"]["enable"], told["session_logging"]["generate_titles"]) == (False, False)


def test_a_models_name_may_hold_anything(tmp_path: Path) -> None:
    name = 'policy "7b"\\n\u2028\n= café'
    endpoint = msgspec.structs.replace(ENDPOINT, model=name)
    launch = VIBE.launch(TASK, endpoint, cache=tmp_path, workspace="/workspace", home="/home/agent")
    assert tomllib.loads(launch.home_files["vibe/config.toml"])["models"][0]["name"] == name


def test_it_has_no_options() -> None:
    with pytest.raises(UsageError, match="has no option 'tools'"):
        VIBE.check(HarnessSpec("mistral_vibe", {"tools": "all"}))
