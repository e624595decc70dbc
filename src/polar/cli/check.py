"""`polar harness check`: does each harness work here?"""

from collections.abc import Callable, Sequence
from pathlib import Path

from polar import harnesses
from polar.cli.checked import lines, table, with_rows
from polar.cli.console import log_warnings, output, plain
from polar.cli.errors import FAILED
from polar.cli.interrupt import Stopped, drive
from polar.engines.embedded.models import SMOLLM2, resolve
from polar.errors import UsageError
from polar.harnesses.protocol import Harness
from polar.paths import cache_dir
from polar.rollout.check import Checked, check


def check_command(names: Sequence[str], *, every: bool, installed_only: bool, markdown: bool, write: Path | None) -> int:
    """Check one after the other, saying what was seen of each as soon as it is known; the exit status.

    Args:
        every: all harnesses that have a probe; `installed_only` leaves out those that would be installed first.
        markdown: print a table for a document instead, and progress to stderr.
        write: document whose table gets the rows of what was checked.

    Raises:
        UsageError: one of them does not exist or has no probe, or the document has no place for the table; nothing is checked.
    """
    wanted = _every(installed_only) if every else _named(names)
    if every == bool(names) or (installed_only and not every):
        raise UsageError("name the harnesses to check, or say --all (to which --installed-only belongs)")
    if write is not None:
        with_rows(write, ())
    progress = output(stderr=markdown)
    log_warnings()

    def tell(checked: Checked) -> None:
        for line in lines(checked):
            progress.print(line, soft_wrap=True)

    try:
        told = drive(_check_all(wanted, lambda line: progress.print(plain(line, "dim"), soft_wrap=True), tell), lambda: None)
    except Stopped as stopped:
        return stopped.status
    if markdown:
        output().print(plain(table(told)), soft_wrap=True)
    if write is not None:
        write.write_text(with_rows(write, told))
    fine = sum(checked.ok for checked in told)
    progress.print(plain(f"{fine} of {len(told)} harnesses work", "green" if fine == len(told) else "red"))
    return 0 if fine == len(told) else FAILED


def _named(names: Sequence[str]) -> dict[str, Harness]:
    found = {name: harnesses.get(name) for name in names}
    for name, harness in found.items():
        if not harness.probe:
            raise UsageError(
                f"harness {name!r} has no probe to check it with: a scripted session, see polar.harnesses.protocol.Harness"
            )
    return found


def _every(installed_only: bool) -> dict[str, Harness]:
    every = {name: harness for name in harnesses.names() if (harness := harnesses.get(name)).probe}
    found = {name: each for name, each in every.items() if each.installed(cache_dir()) or not installed_only}
    if not found:
        raise UsageError(f"no harness is installed in {cache_dir()}: leave out --installed-only, and they will be")
    return found


async def _check_all(wanted: dict[str, Harness], report: Callable[[str], None], tell: Callable[[Checked], None]) -> list[Checked]:
    model_dir = resolve(SMOLLM2)
    told: list[Checked] = []
    for name, harness in wanted.items():
        told.append(await check(name, harness, model_dir, report))
        tell(told[-1])
    return told
