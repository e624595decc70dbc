"""The preset of OpenCode, and the real OpenCode."""

import json
from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.errors import InstallError, UsageError
from polar.harnesses import opencode
from polar.harnesses.protocol import Launch
from polar.sandboxes import Exit
from polar.specs import HarnessSpec, SamplingSpec, Task
from tests.harnesses.conftest import ENDPOINT, Start

OPENCODE = harnesses.get("opencode")
TASK = Task("t", "--version @file /help", harness=HarnessSpec("opencode"))


@pytest.fixture(scope="module")
def installed(cache_dir: Path) -> None:
    OPENCODE.install(cache_dir, print)
    assert OPENCODE.installed(cache_dir)


def launch(task: Task, cache: Path) -> Launch:
    return OPENCODE.launch(task, ENDPOINT, cache=cache, workspace="/workspace", home="/home/agent")


@pytest.mark.heavy  # 185 MB
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("installed")
async def test_the_real_opencode_starts_in_the_sandbox(start: Start) -> None:
    ended, out, err = await start(TASK, ["--version"])
    assert (ended, out.strip()) == (Exit(0), "1.18.33"), err


def test_the_launch_says_all_that_opencode_must_know(tmp_path: Path) -> None:
    made = launch(TASK, tmp_path)
    assert made.command.stdin == TASK.instruction
    assert TASK.instruction not in made.command.argv
    assert "--title" in made.command.argv, "else its first request would ask for one"
    config = json.loads(made.command.env["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["polar"]
    assert (provider["options"]["baseURL"], provider["options"]["apiKey"]) == ("http://127.0.0.1:1/s/pk-test/v1", "pk-test")
    assert provider["models"]["policy"]["limit"] == {"context": 8192, "output": 2048}
    assert config["permission"] == "allow"


def test_the_tasks_own_limit_is_the_models_but_leaves_most_of_the_window(tmp_path: Path) -> None:
    for asked, told in ((512, 512), (8192, 2048)):
        task = msgspec.structs.replace(TASK, sampling=SamplingSpec(max_tokens=asked))
        config = json.loads(launch(task, tmp_path).command.env["OPENCODE_CONFIG_CONTENT"])
        assert config["provider"]["polar"]["models"]["policy"]["limit"]["output"] == told


def test_its_configuration_looks_as_if_the_plugins_package_were_there(tmp_path: Path) -> None:
    files = launch(TASK, tmp_path).home_files
    wanted = json.loads(files["config/opencode/package.json"])["dependencies"]
    locked = json.loads(files["config/opencode/package-lock.json"])["packages"][""]["dependencies"]
    assert wanted == locked == {"@opencode-ai/plugin": OPENCODE.version}
    assert any(name.startswith("config/opencode/node_modules/") for name in files)


@pytest.mark.parametrize(("flags", "chosen"), [("flags : avx2", "new"), ("flags : sse", "old"), ("", "new")])
def test_the_program_that_fits_the_processor_is_kept(
    flags: str, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = tmp_path / "node_modules"
    for name, text in (("opencode-linux-x64", "new"), ("opencode-linux-x64-baseline", "old"), ("opencode-ai", "")):
        (modules / name / "bin").mkdir(parents=True)
        (modules / name / "bin" / ("opencode" if text else "opencode.exe")).write_text(text)
    monkeypatch.setattr(opencode, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(flags)
    opencode.finish(tmp_path)
    assert (modules / "opencode-ai" / "bin" / "opencode.exe").read_text() == chosen
    assert not list(modules.glob("opencode-*/bin/opencode"))


def test_a_machine_that_npm_serves_no_program_for_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="npm serves no opencode for this operating system"):
        opencode.finish(tmp_path)


def test_opencode_has_no_options() -> None:
    with pytest.raises(UsageError, match="'opencode' has no option 'x'"):
        OPENCODE.check(HarnessSpec("opencode", {"x": ""}))
