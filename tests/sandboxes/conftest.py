"""Sandboxes of every kind, and a way to run shell lines in them."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from polar.sandboxes import Command, Exit, Sandbox, SandboxFactory, bubblewrap, choose, shell


def need_bubblewrap() -> None:
    """Skip where bubblewrap cannot run; in CI that is a failure."""
    if problem := bubblewrap.problem():
        message = f"{problem}; install it with `apt-get install bubblewrap`"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)


@dataclass
class Box:
    """A sandbox whose output is at hand."""

    sandbox: Sandbox
    logs: Path

    async def run(self, command: str | Command, timeout: float = 20.0) -> Exit:
        command = shell(command) if isinstance(command, str) else command
        return await self.sandbox.run(command, stdout=self.logs / "out", stderr=self.logs / "err", timeout=timeout)

    @property
    def out(self) -> str:
        return (self.logs / "out").read_text()

    @property
    def err(self) -> str:
        return (self.logs / "err").read_text()


OpenBox = Callable[[], AbstractAsyncContextManager[Box]]


@pytest.fixture(params=["process", "bubblewrap"])
def factory(request: pytest.FixtureRequest, tmp_path: Path) -> SandboxFactory:
    if request.param == "bubblewrap":
        need_bubblewrap()
    return choose(request.param, tmp_path / "sandboxes")


@pytest.fixture
def open_box(factory: SandboxFactory, tmp_path: Path) -> OpenBox:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Box]:
        sandbox = await factory.create("test")
        try:
            yield Box(sandbox, tmp_path)
        finally:
            await sandbox.close()

    return opened
