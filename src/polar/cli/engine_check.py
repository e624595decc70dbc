"""`polar engine check`: the self-test of an engine as a table."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from polar.cli.console import output, plain
from polar.cli.errors import FAILED
from polar.cli.interrupt import Stopped, drive
from polar.engines.proofs import SelfTest
from polar.rollout.connect import EngineOptions, engine_at, find_renderer, prove

STYLES = {"proven": "green", "unproven": "yellow", "failed": "bold red"}


def check_command(engine: str, *, model: str, renderer: str) -> int:
    """Test the engine; the exit status."""
    console = output()

    def note(line: str) -> None:
        console.print(plain(line, "dim"), soft_wrap=True)

    async def work() -> Mapping[str, SelfTest]:
        with tempfile.TemporaryDirectory(prefix="polar-engine-") as scratch:
            options = EngineOptions(engine, model, renderer)
            async with engine_at(engine, model, log=Path(scratch) / "engine.log", note=note) as opened:
                return await prove(opened, await find_renderer(opened, options, note))

    try:
        tested = drive(work(), lambda: note("stopping"))
    except Stopped as stopped:
        return stopped.status
    for name, test in tested.items():
        console.print(_table(test))
        for proof in (*test.of("failed"), *test.of("unproven")):
            console.print(plain(f"{proof.code}: {proof.advice}", STYLES[proof.verdict]), soft_wrap=True)
        console.print(plain(f"{name}: {_verdict(test)}", STYLES[_worst(test)]), soft_wrap=True)
    return FAILED if any(test.of("failed") for test in tested.values()) else 0


def _table(test: SelfTest) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "claim", "", "seen"):
        table.add_column(name)
    for proof in test.proofs:
        table.add_row(proof.code, proof.says, plain(proof.verdict, STYLES[proof.verdict]), plain(proof.detail))
    return table


def _verdict(test: SelfTest) -> str:
    if test.of("failed"):
        return "it is not served"
    return "it is served with --accept-unproven" if test.doubts else "it can be trained with"


def _worst(test: SelfTest) -> str:
    return "failed" if test.of("failed") else "unproven" if test.doubts else "proven"
