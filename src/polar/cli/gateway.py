"""`polar gateway`: the gateway alone, for harnesses that something else starts."""

import asyncio
import os
import secrets
from pathlib import Path

from rich.console import Console

from polar.cli.console import log_warnings, output, plain
from polar.cli.interrupt import Stopped, drive
from polar.errors import UsageError
from polar.gateway.gateway import Gateway, gateway
from polar.rollout.connect import EngineOptions, connected
from polar.rollout.folder import RunFolder

CONTROL_KEY = "POLAR_CONTROL_KEY"


def gateway_command(out: Path, *, serving: EngineOptions, host: str, port: int) -> int:
    """Serve until SIGTERM or Ctrl-C, which are how a server ends: both exit with 0."""
    console = output()
    log_warnings()
    folder = RunFolder(out)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}") from None
    try:
        drive(_serve(console, folder, serving, host, port), lambda: _note(console, "stopping"))
    except Stopped:
        pass
    return 0


async def _serve(console: Console, folder: RunFolder, serving: EngineOptions, host: str, port: int) -> None:
    given = os.environ.get(CONTROL_KEY, "")
    key = given or secrets.token_urlsafe(24)
    async with (
        connected(serving, log=folder.engine_log, note=lambda line: _note(console, line)) as backend,
        gateway(backend.policy, folder.capture, routes=backend.routes, host=host, port=port, control_key=key) as running,
    ):
        _announce(console, running, "" if given else key)
        if backend.process is not None:
            raise await backend.process.wait_dead()
        await asyncio.Event().wait()


def _announce(console: Console, running: Gateway, fresh_key: str) -> None:
    lines = [f"polar gateway ready on {running.url}"]
    if running.restored:
        lines.append(f"{running.restored} open sessions of an earlier process go on")
    if fresh_key:
        lines.append(f"export {CONTROL_KEY}={fresh_key}")
    authorised = f'-H "Authorization: Bearer ${CONTROL_KEY}"'
    lines += [
        "open a session:   " + f"curl -X POST {running.url}/sessions {authorised}",
        "close it:         " + f"curl -X POST {running.url}/sessions/SESSION_ID/freeze {authorised}",
        "take its traces:  " + f"curl {running.url}/sessions/SESSION_ID/trajectory {authorised}",
    ]
    for line in lines:
        console.print(plain(line), soft_wrap=True)


def _note(console: Console, line: str) -> None:
    console.print(plain(line, "dim"), soft_wrap=True)
