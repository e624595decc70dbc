"""The preset of Cline CLI, and the real Cline CLI."""

import json
from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.errors import InstallError, UsageError
from polar.harnesses import cline
from polar.harnesses.protocol import Launch
from polar.sandboxes import Exit
from polar.specs import HarnessSpec, SamplingSpec, Task
from tests.harnesses.conftest import ENDPOINT, Start

CLINE = harnesses.get("cline")
TASK = Task("t", "--version @file /help", harness=HarnessSpec("cline"))


@pytest.fixture(scope="module")
def installed(cache_dir: Path) -> None:
    CLINE.install(cache_dir, print)
    assert CLINE.installed(cache_dir)


def launch(task: Task, cache: Path) -> Launch:
    return CLINE.launch(task, ENDPOINT, cache=cache, workspace="/workspace", home="/home/agent")


def settings(task: Task, cache: Path) -> dict[str, object]:
    providers = json.loads(launch(task, cache).home_files["cline/data/settings/providers.json"])
    told: dict[str, object] = providers["providers"][providers["lastUsedProvider"]]["settings"]
    return told


@pytest.mark.wide  # 360 MB
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("installed")
async def test_the_real_cline_starts_in_the_sandbox(start: Start) -> None:
    ended, out, err = await start(TASK, ["--version"])
    assert (ended, out.strip()) == (Exit(0), "3.0.65"), err


def test_the_launch_says_all_that_cline_must_know(tmp_path: Path) -> None:
    made = launch(TASK, tmp_path)
    assert made.command.argv[-2:] == ("--", TASK.instruction)
    assert made.command.argv[made.command.argv.index("--model") + 1] == "policy"
    assert "pk-test" not in made.command.argv
    told = settings(TASK, tmp_path)
    assert (told["baseUrl"], told["apiKey"]) == ("http://127.0.0.1:1/s/pk-test/v1", "pk-test")
    assert (told["provider"], told["model"]) == (made.command.argv[made.command.argv.index("--provider") + 1], "policy")
    assert made.command.env["CLINE_DIR"] == "/home/agent/cline"
    assert made.command.env["CLINE_SESSION_BACKEND_MODE"] == "local", "else a daemon would outlive the run"


def test_it_keeps_to_itself(tmp_path: Path) -> None:
    made = launch(TASK, tmp_path)
    told = json.loads(made.home_files["cline/data/settings/global-settings.json"])
    assert (told["telemetryOptOut"], told["autoUpdateEnabled"]) == (True, False)
    assert made.command.env["CLINE_NO_AUTO_UPDATE"] == "1"


@pytest.mark.parametrize(("asked", "told"), [(None, 2048), (512, 512), (8192, 2048)])
def test_the_window_is_the_policys_and_summaries_leave_most_of_it(asked: int | None, told: int, tmp_path: Path) -> None:
    made = settings(msgspec.structs.replace(TASK, sampling=SamplingSpec(max_tokens=asked)), tmp_path)
    assert (made["contextWindow"], made["maxTokens"]) == (8192, told)


@pytest.mark.parametrize(
    ("instruction", "told"),
    [
        ("history", "Task: history"),
        (" history\n", "Task:  history\n"),
        ("/team up", "Task: /team up"),
        ("\n/team up", "Task: \n/team up"),
        ("--help me", "--help me"),
    ],
)
def test_what_would_be_a_command_gets_a_word_before_it(instruction: str, told: str, tmp_path: Path) -> None:
    assert launch(msgspec.structs.replace(TASK, instruction=instruction), tmp_path).command.argv[-1] == told


def test_an_instruction_that_no_argument_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="longer than the"):
        launch(msgspec.structs.replace(TASK, instruction="many words " * 20_000), tmp_path)


def test_the_program_of_this_machine_takes_the_place_that_the_launch_names(tmp_path: Path) -> None:
    for directory in ("@cline/cli-linux-x64/bin", "cline/bin"):
        (tmp_path / "node_modules" / directory).mkdir(parents=True)
    (tmp_path / "node_modules" / "@cline/cli-linux-x64/bin/cline").write_text("program")
    cline.place_program(tmp_path)
    assert (tmp_path / "node_modules" / "cline/bin/.cline").read_text() == "program"


def test_a_machine_that_npm_serves_no_program_for_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="cline: npm should have installed one program for this system, and installed none"):
        cline.place_program(tmp_path)


def test_cline_has_no_options() -> None:
    with pytest.raises(UsageError, match="'cline' has no option 'x'"):
        CLINE.check(HarnessSpec("cline", {"x": ""}))
