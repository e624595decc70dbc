"""`polar laptop`: make the laptop policy anew."""

import time
from pathlib import Path

from polar.cli.console import log_warnings, output
from polar.cli.interrupt import Stopped, drive
from polar.cli.progress import Progress


def laptop_command(out: Path, *, model: str) -> int:
    """Make it, and say how good it is; the exit status."""
    from polar.laptop.recipe import LAPTOP, LARGER, make

    console = output()
    log_warnings()
    progress, began = Progress(console), time.monotonic()
    try:
        with progress.shown():
            reached = drive(make(LARGER if model else LAPTOP, out, progress, model), lambda: progress.note("stopping"))
    except Stopped as stopped:
        console.print("stopped; the recipe begins anew next time", style="yellow")
        return stopped.status
    console.print(f"{out}: {reached:.1%} of dialogues are the expert's, after {time.monotonic() - began:.0f} s", soft_wrap=True)
    return 0
