"""Real harnesses in real sandboxes."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.harnesses import Endpoint
from polar.sandboxes import Exit, SandboxFactory, choose
from polar.specs import Task
from tests.sandboxes.conftest import need_bubblewrap

PROGRAMS = (
    "cli.js",
    "codex.js",
    "gemini.js",
    "cn.js",
    "/copilot",
    "/.cline",
    "claude.exe",
    "opencode.exe",
    "/bin/openhands",
    "/bin/vibe",
    "/bin/hermes",
    "/bin/aider",
    "gptme",
)
ENDPOINT = Endpoint("http://127.0.0.1:1/s/pk-test", "pk-test", "policy", 8192)


@pytest.fixture(params=["process", "bubblewrap"])
def factory(request: pytest.FixtureRequest, tmp_path: Path) -> SandboxFactory:
    if request.param == "bubblewrap":
        need_bubblewrap()
    return choose(request.param, tmp_path / "sandboxes")


Start = Callable[[Task, list[str]], Awaitable[tuple[Exit, str, str]]]


@pytest.fixture
def start(factory: SandboxFactory, tmp_path: Path, cache_dir: Path) -> Start:
    """Run what `launch` says, with the arguments after the program replaced by `arguments` if there are any."""

    async def started(task: Task, arguments: list[str]) -> tuple[Exit, str, str]:
        sandbox = await factory.create("test")
        launch = harnesses.get(task.harness.name).launch(
            task, ENDPOINT, cache=cache_dir, workspace=sandbox.workspace, home=sandbox.home
        )
        command = launch.command
        if arguments:
            program = next(n for n, part in enumerate(command.argv) if part.endswith(PROGRAMS) or part == "minisweagent")
            command = msgspec.structs.replace(command, argv=(*command.argv[: program + 1], *arguments))
        await sandbox.put(launch.home_files, into=sandbox.home)
        try:
            ended = await sandbox.run(command, stdout=tmp_path / "out", stderr=tmp_path / "err", timeout=100)
        finally:
            await sandbox.close()
        return ended, (tmp_path / "out").read_text(), (tmp_path / "err").read_text()

    return started
