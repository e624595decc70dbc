"""`polar harness`: which agent programs there are, and how they get here."""

from collections.abc import Sequence

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from polar import harnesses
from polar.cli.console import output, plain
from polar.paths import cache_dir


def list_command() -> None:
    """Print a row per harness."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("harness", "version", "installed", "what it is"):
        table.add_column(name)
    for name in harnesses.names():
        harness = harnesses.get(name)
        installed = plain("yes", "green") if harness.installed(cache_dir()) else plain("no", "yellow")
        table.add_row(plain(name), plain(harness.version or "–"), installed, plain(harness.summary))
    output().print(table)


def install_command(names: Sequence[str]) -> None:
    """Install, saying each step; what is there already is left alone.

    Raises:
        UsageError: one of them does not exist; then nothing is installed.
        InstallError: one of them cannot be installed.
    """
    console = output()
    for harness in [harnesses.get(name) for name in names]:
        if harness.installed(cache_dir()):
            console.print(plain(f"{harness.name} {harness.version} is installed in {cache_dir()}"), soft_wrap=True)
            continue
        harness.install(cache_dir(), lambda line: console.print(plain(line, "dim"), soft_wrap=True))
        console.print(plain(f"{harness.name} {harness.version} installed in {cache_dir()}", "green"), soft_wrap=True)


def profile_command(name: str) -> None:
    """Print what the gateway should know of a harness, as `POST /sessions` takes it.

    Raises:
        UsageError: there is no such harness.
    """
    profile = msgspec.json.encode(harnesses.get(name).profile)
    output().print(plain(msgspec.json.format(profile).decode()), soft_wrap=True)
