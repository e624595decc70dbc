"""The preset of Hermes Agent, and the real one."""

import json
from pathlib import Path

import msgspec
import pytest
import yaml

from polar import harnesses
from polar.errors import UsageError
from polar.sandboxes import Exit
from polar.specs import HarnessSpec, Task
from tests.harnesses.conftest import ENDPOINT, Start

HERMES = harnesses.get("hermes")
TASK = Task("t", "--version", harness=HarnessSpec("hermes"))


@pytest.mark.wide  # 230 MB
@pytest.mark.timeout(1800)
async def test_the_real_hermes_starts_in_the_sandbox_and_believes_to_be_up_to_date(start: Start, cache_dir: Path) -> None:
    HERMES.install(cache_dir, print)
    assert HERMES.installed(cache_dir)
    ended, out, err = await start(TASK, ["--version"])
    assert ended == Exit(0), err
    assert f"v{HERMES.version}" in out
    assert "Up to date" in out


def test_the_instruction_is_the_value_of_an_option(tmp_path: Path) -> None:
    launch = HERMES.launch(TASK, ENDPOINT, cache=tmp_path, workspace="/workspace", home="/home/agent")
    assert launch.command.argv[-1] == "--oneshot=--version"


def test_the_launch_says_all_that_hermes_must_know(tmp_path: Path) -> None:
    launch = HERMES.launch(TASK, ENDPOINT, cache=tmp_path, workspace="/workspace", home="/home/agent")
    assert launch.command.env["HERMES_HOME"] == "/home/agent/hermes"
    told = yaml.safe_load(launch.home_files["hermes/config.yaml"])
    assert told["model"] == {
        "provider": "custom",
        "default": "policy",
        "base_url": "http://127.0.0.1:1/s/pk-test/v1",
        "api_key": "pk-test",
        "context_length": 64_000,
    }
    assert told["auxiliary"]["title_generation"]["enabled"] is False
    assert "pk-test" not in json.dumps(launch.command.argv)


@pytest.mark.parametrize(("window", "told"), [(8192, 64_000), (64_000, 64_000), (131_072, 131_072)])
def test_a_window_that_it_would_refuse_is_told_as_the_least_it_takes(window: int, told: int, tmp_path: Path) -> None:
    endpoint = msgspec.structs.replace(ENDPOINT, max_model_len=window)
    launch = HERMES.launch(TASK, endpoint, cache=tmp_path, workspace="/workspace", home="/home/agent")
    config = yaml.safe_load(launch.home_files["hermes/config.yaml"])
    assert (config["model"]["context_length"], config["auxiliary"]["compression"]["context_length"]) == (told, told)


def test_it_has_no_options() -> None:
    with pytest.raises(UsageError, match="has no option 'tools'"):
        HERMES.check(HarnessSpec("hermes", {"tools": "all"}))
