"""Any program as a harness."""

from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.errors import UsageError
from polar.sandboxes import Exit
from polar.specs import HarnessSpec, Task
from tests.harnesses.conftest import ENDPOINT, Start

TASK = Task(
    "t", "say 'hi'\n$HOME", harness=HarnessSpec("shell", {"command": 'env | grep -E "^(POLAR|OPENAI|ANTHROPIC)_"; exit 3'})
)


async def test_the_program_finds_its_model_in_the_environment(start: Start) -> None:
    ended, out, _ = await start(TASK, [])
    assert ended == Exit(3)
    assert {line for line in out.splitlines() if not line.startswith("POLAR_COMMAND")} == {
        "OPENAI_BASE_URL=http://127.0.0.1:1/s/pk-test/v1",
        "OPENAI_API_KEY=pk-test",
        "ANTHROPIC_BASE_URL=http://127.0.0.1:1/s/pk-test",
        "ANTHROPIC_API_KEY=pk-test",
        "POLAR_BASE_URL=http://127.0.0.1:1/s/pk-test",
        "POLAR_API_KEY=pk-test",
        "POLAR_MODEL=policy",
        "POLAR_INSTRUCTION=say 'hi'",
    }


def test_an_instruction_that_no_environment_holds_is_refused(tmp_path: Path) -> None:
    task = msgspec.structs.replace(TASK, instruction="x" * 140_000)
    with pytest.raises(UsageError, match="longer than"):
        harnesses.get("shell").launch(task, ENDPOINT, cache=tmp_path, workspace="/w", home="/h")


def test_there_is_nothing_to_install(tmp_path: Path) -> None:
    shell = harnesses.get("shell")
    assert shell.installed(tmp_path)
    shell.install(tmp_path / "cache", print)
    assert not (tmp_path / "cache").exists()
