"""`polar plot`: the curves of training runs."""

from collections.abc import Sequence
from pathlib import Path

from polar.cli.console import output
from polar.errors import UsageError


def plot_command(runs: Sequence[Path], *, metrics: Sequence[str], out: Path | None) -> None:
    """Draw, and say where to."""
    from polar.training.curves import METRICS, draw

    target = out or runs[0] / "curves.png"
    drawn = draw(runs, metrics or METRICS, target)
    if not drawn:
        raise UsageError(f"none of {', '.join(metrics or METRICS)} is among the metrics of {', '.join(map(str, runs))}")
    output().print(f"{target}: {', '.join(drawn)}", soft_wrap=True)
