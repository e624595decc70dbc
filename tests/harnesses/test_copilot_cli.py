"""The preset of Copilot CLI, and the real Copilot CLI."""

from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.errors import InstallError, UsageError
from polar.harnesses import copilot_cli
from polar.harnesses.protocol import Launch
from polar.sandboxes import Exit
from polar.specs import HarnessSpec, SamplingSpec, Task
from tests.harnesses.conftest import ENDPOINT, Start

COPILOT = harnesses.get("copilot_cli")
TASK = Task("t", "--version @file /help", harness=HarnessSpec("copilot_cli"))


@pytest.fixture(scope="module")
def installed(cache_dir: Path) -> None:
    COPILOT.install(cache_dir, print)
    assert COPILOT.installed(cache_dir)


def launch(task: Task, cache: Path) -> Launch:
    return COPILOT.launch(task, ENDPOINT, cache=cache, workspace="/workspace", home="/home/agent")


@pytest.mark.wide  # 440 MB
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("installed")
async def test_the_real_copilot_starts_in_the_sandbox(start: Start) -> None:
    ended, out, err = await start(TASK, ["--version"])
    assert (ended, out.splitlines()[0]) == (Exit(0), "GitHub Copilot CLI 1.0.102."), err


@pytest.mark.wide
@pytest.mark.usefixtures("installed")
def test_it_is_unpacked_where_the_launch_looks_for_it(cache_dir: Path) -> None:
    unpacked = Path(launch(TASK, cache_dir).command.env["COPILOT_PKG_CACHE_HOME"])
    assert list(unpacked.glob(f"pkg/*/{COPILOT.version}/index.js"))


def test_the_launch_says_all_that_copilot_must_know(tmp_path: Path) -> None:
    command = launch(TASK, tmp_path).command
    assert command.stdin == TASK.instruction
    assert TASK.instruction not in command.argv
    assert "pk-test" not in command.argv
    told = command.env
    assert (told["COPILOT_MODEL"], told["COPILOT_PROVIDER_API_KEY"]) == ("policy", "pk-test")
    assert (told["COPILOT_OFFLINE"], told["COPILOT_AUTO_UPDATE"]) == ("true", "false")
    assert told["COPILOT_HOME"].startswith("/home/agent/")
    assert told["COPILOT_CACHE_HOME"].startswith("/home/agent/")
    assert Path(told["COPILOT_PKG_CACHE_HOME"]).is_relative_to(command.readable[0])


@pytest.mark.parametrize(
    ("options", "provider", "wire", "path"),
    [
        ({}, "openai", "completions", "/v1"),
        ({"api": "completions"}, "openai", "completions", "/v1"),
        ({"api": "responses"}, "openai", "responses", "/v1"),
        ({"api": "anthropic"}, "anthropic", "completions", ""),
    ],
)
def test_each_api_has_its_provider_and_its_path(
    options: dict[str, str], provider: str, wire: str, path: str, tmp_path: Path
) -> None:
    task = msgspec.structs.replace(TASK, harness=HarnessSpec("copilot_cli", options))
    COPILOT.check(task.harness)
    told = launch(task, tmp_path).command.env
    assert (told["COPILOT_PROVIDER_TYPE"], told["COPILOT_PROVIDER_WIRE_API"]) == (provider, wire)
    assert told["COPILOT_PROVIDER_BASE_URL"] == f"http://127.0.0.1:1/s/pk-test{path}"


@pytest.mark.parametrize(("asked", "output"), [(None, 2048), (512, 512), (8192, 2048)])
def test_prompt_and_reply_fill_the_window_and_the_prompt_has_most_of_it(asked: int | None, output: int, tmp_path: Path) -> None:
    told = launch(msgspec.structs.replace(TASK, sampling=SamplingSpec(max_tokens=asked)), tmp_path).command.env
    assert told["COPILOT_PROVIDER_MAX_OUTPUT_TOKENS"] == str(output)
    assert told["COPILOT_PROVIDER_MAX_PROMPT_TOKENS"] == str(8192 - output)


@pytest.mark.parametrize(
    ("natives", "named"), [((), "none"), (("copilot-linux-x64", "copilot-linuxmusl-x64"), "x64/copilot, @github/copilot-l")]
)
def test_a_machine_without_one_program_of_its_own_is_told_so(natives: tuple[str, ...], named: str, tmp_path: Path) -> None:
    for name in natives:
        (tmp_path / "node_modules" / "@github" / name).mkdir(parents=True)
        (tmp_path / "node_modules" / "@github" / name / "copilot").touch()
    with pytest.raises(InstallError, match=f"copilot_cli: npm should have installed one program.* installed .*{named}"):
        copilot_cli.finish(tmp_path)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"apis": "responses"}, r"has no option 'apis' \(did you mean 'api'\?\); its options: `api`"),
        ({"api": "chat"}, r"option 'api' is `completions` or `responses` or `anthropic`, not 'chat'"),
    ],
)
def test_an_option_that_it_has_not_is_refused(options: dict[str, str], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        COPILOT.check(HarnessSpec("copilot_cli", options))
