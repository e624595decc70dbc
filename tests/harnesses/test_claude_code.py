"""The preset of Claude Code, and the real Claude Code."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.errors import InstallError, UsageError
from polar.harnesses.claude_code import _place_program
from polar.sandboxes import Exit
from polar.sandboxes.protocol import Command
from polar.specs import HarnessSpec, SamplingSpec, Task
from tests.harnesses.conftest import ENDPOINT, Start

CLAUDE_CODE = harnesses.get("claude_code")
TASK = Task("t", "--version @file /help", harness=HarnessSpec("claude_code"))


def command(cache: Path, options: Mapping[str, str] = {}, *, window: int = 200_000, max_tokens: int | None = None) -> Command:
    task = msgspec.structs.replace(
        TASK, harness=HarnessSpec("claude_code", dict(options)), sampling=SamplingSpec(max_tokens=max_tokens)
    )
    endpoint = msgspec.structs.replace(ENDPOINT, max_model_len=window)
    return CLAUDE_CODE.launch(task, endpoint, cache=cache, workspace="/workspace", home="/home/agent").command


@pytest.mark.heavy  # 400 MB
@pytest.mark.timeout(600)
async def test_the_real_claude_code_starts_in_the_sandbox(start: Start, cache_dir: Path) -> None:
    CLAUDE_CODE.install(cache_dir, print)
    assert CLAUDE_CODE.installed(cache_dir)
    ended, out, err = await start(TASK, ["--version"])
    assert (ended, out.strip()) == (Exit(0), "2.1.332 (Claude Code)"), err


def test_the_launch_says_all_that_claude_code_must_know(tmp_path: Path) -> None:
    told = command(tmp_path)
    assert told.stdin == TASK.instruction
    assert TASK.instruction not in told.argv
    assert told.argv[told.argv.index("--model") + 1] == "policy"
    assert told.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1/s/pk-test"
    assert told.env["ANTHROPIC_API_KEY"] == "pk-test"
    assert told.env["CLAUDE_CONFIG_DIR"] == "/home/agent/claude"
    assert told.env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"


def test_a_first_slash_is_text_behind_a_newline(tmp_path: Path) -> None:
    task = msgspec.structs.replace(TASK, instruction="/compact")
    launch = CLAUDE_CODE.launch(task, ENDPOINT, cache=tmp_path, workspace="/workspace", home="/home/agent")
    assert launch.command.stdin == "\n/compact"


@pytest.mark.parametrize(
    ("window", "max_tokens", "told"),
    [
        (200_000, None, 200_000),  # it compacts 33,000 tokens before the end, less than a quarter
        (8192, None, 8192 + 33_000 - 2048),
        (8192, 512, 8192 + 13_512 - 2048),
        (40_000, 512, 40_000 + 13_512 - 10_000),
    ],
)
def test_a_window_is_told_so_that_compaction_leaves_a_quarter_of_it(
    tmp_path: Path, window: int, max_tokens: int | None, told: int
) -> None:
    env = command(tmp_path, window=window, max_tokens=max_tokens).env
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(told)
    assert env.get("CLAUDE_CODE_MAX_OUTPUT_TOKENS") == (str(max_tokens) if max_tokens else None)


def test_few_tools_and_waiting_for_sub_agents_are_the_default(tmp_path: Path) -> None:
    plain, full = command(tmp_path), command(tmp_path, {"tools": "default", "background": "on"})
    assert "--bare" in plain.argv
    assert "--bare" not in full.argv
    assert plain.env["CLAUDE_CODE_DISABLE_BACKGROUND_TASKS"] == "1"
    assert "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS" not in full.env


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tool": "bare"}, r"has no option 'tool' \(did you mean 'tools'\?\); its options: `tools`, `background`"),
        ({"background": "yes"}, r"option 'background' is `off` or `on`, not 'yes'"),
    ],
)
def test_an_option_that_it_has_not_is_refused(options: dict[str, str], error: str) -> None:
    CLAUDE_CODE.check(HarnessSpec("claude_code", {"tools": "default", "background": "on"}))
    with pytest.raises(UsageError, match=error):
        CLAUDE_CODE.check(HarnessSpec("claude_code", options))


def place(modules: Path, *packages: str) -> None:
    """What npm leaves: a stub, and a native package for each system that it thinks this one is."""
    for package, name in [("claude-code/bin", "claude.exe"), *((package, "claude") for package in packages)]:
        (modules / "@anthropic-ai" / package).mkdir(parents=True)
        (modules / "@anthropic-ai" / package / name).write_text(package)


def test_the_native_program_takes_the_place_of_the_stub(tmp_path: Path) -> None:
    place(tmp_path / "node_modules", "claude-code-linux-x64")
    _place_program(tmp_path)
    program = tmp_path / "node_modules/@anthropic-ai/claude-code/bin/claude.exe"
    assert program.read_text() == "claude-code-linux-x64"


@pytest.mark.parametrize(
    ("packages", "named"),
    [
        ((), "none"),
        (("claude-code-linux-x64", "claude-code-linux-x64-musl"), ".*linux-x64/claude, .*linux-x64-musl/claude"),
    ],
)
def test_without_exactly_one_native_program_there_is_no_installation(
    tmp_path: Path, packages: tuple[str, ...], named: str
) -> None:
    place(tmp_path / "node_modules", *packages)
    with pytest.raises(InstallError, match=f"one program for this system, and installed {named}$"):
        _place_program(tmp_path)
