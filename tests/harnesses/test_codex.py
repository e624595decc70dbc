"""The preset of Codex, and the real Codex."""

import json
import tomllib
from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.errors import UsageError
from polar.harnesses import Endpoint
from polar.sandboxes import Exit
from polar.specs import HarnessSpec, Task
from tests.harnesses.conftest import ENDPOINT, Start

CODEX = harnesses.get("codex")
TASK = Task("t", "--version @file /help", harness=HarnessSpec("codex"))
ALL = msgspec.structs.replace(TASK, harness=HarnessSpec("codex", {"tools": "all"}))


@pytest.fixture(scope="module")
def installed(cache_dir: Path) -> None:
    CODEX.install(cache_dir, print)
    assert CODEX.installed(cache_dir)


def config(task: Task, endpoint: Endpoint, cache: Path) -> dict[str, object]:
    launch = CODEX.launch(task, endpoint, cache=cache, workspace="/workspace", home="/home/agent")
    return tomllib.loads(launch.home_files["codex/config.toml"])


@pytest.mark.heavy  # 440 MB
@pytest.mark.usefixtures("installed")
@pytest.mark.timeout(600)
async def test_the_real_codex_starts_in_the_sandbox(start: Start) -> None:
    ended, out, err = await start(TASK, ["--version"])
    assert (ended, out.strip()) == (Exit(0), "codex-cli 0.171.0"), err


@pytest.mark.heavy
@pytest.mark.usefixtures("installed")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("task", [TASK, ALL], ids=["minimal", "all"])
async def test_the_real_codex_knows_every_field_of_its_configuration(start: Start, task: Task) -> None:
    silent = msgspec.structs.replace(task, instruction="")
    ended, _, err = await start(silent, ["exec", "--strict-config", "--skip-git-repo-check", "-"])
    assert (ended.status, err.splitlines()[-1]) == (1, "No prompt provided via stdin."), (
        "an unknown field is an error before that"
    )


@pytest.mark.heavy
@pytest.mark.usefixtures("installed")
def test_the_launch_says_all_that_codex_must_know(cache_dir: Path) -> None:
    launch = CODEX.launch(TASK, ENDPOINT, cache=cache_dir, workspace="/workspace", home="/home/agent")
    assert launch.command.stdin == TASK.instruction
    assert launch.command.argv[-1] == "-", "the instruction is read from standard input"
    assert launch.command.env["CODEX_HOME"] == "/home/agent/codex"
    told = config(TASK, ENDPOINT, cache_dir)
    provider = told["model_providers"]["polar"]  # type: ignore[index]
    assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:1/s/pk-test/v1", "responses")
    assert launch.command.env[provider["env_key"]] == "pk-test"
    assert "pk-test" not in json.dumps(launch.command.argv)
    assert told["model"] == "policy"


@pytest.mark.heavy
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("window", "compact", "output"), [(8192, 6144, 1024), (200_000, 183_616, 8192)])
def test_compaction_begins_before_the_window_ends(cache_dir: Path, window: int, compact: int, output: int) -> None:
    told = config(TASK, msgspec.structs.replace(ENDPOINT, max_model_len=window), cache_dir)
    assert told["model_context_window"] == window
    assert told["model_auto_compact_token_limit"] == compact
    assert told["tool_output_token_limit"] == output, "what a tool prints fits between that and the window's end"


@pytest.mark.heavy
@pytest.mark.usefixtures("installed")
def test_a_models_name_may_hold_anything(cache_dir: Path) -> None:
    name = 'policy "7b"\\n\x7f\u2028\n= café'
    assert config(TASK, msgspec.structs.replace(ENDPOINT, model=name), cache_dir)["model"] == name


@pytest.mark.heavy
@pytest.mark.usefixtures("installed")
def test_sub_agents_are_there_when_asked_for(cache_dir: Path) -> None:
    assert config(TASK, ENDPOINT, cache_dir)["agents"] == {"enabled": False}
    assert config(ALL, ENDPOINT, cache_dir)["agents"] == {"enabled": True}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tool": "all"}, r"has no option 'tool' \(did you mean 'tools'\?\); its options: `tools`"),
        ({"tools": "some"}, r"option 'tools' is `minimal` or `all`, not 'some'"),
    ],
)
def test_an_option_that_it_has_not_is_refused(options: dict[str, str], error: str) -> None:
    CODEX.check(ALL.harness)
    with pytest.raises(UsageError, match=error):
        CODEX.check(HarnessSpec("codex", options))
