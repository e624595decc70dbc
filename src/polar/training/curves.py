"""Curves of training runs as a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polar.errors import UsageError
from polar.training.batch import Float64Array
from polar.training.metrics import FILE, read

METRICS = ("reward", "pass@1", "delta", "entropy", "grad_norm", "staleness", "trained_share", "engine_busy")
SMOOTHED_OVER = 5  # steps
ENDINGS = (".png", ".svg", ".pdf")


def draw(runs: Sequence[Path], metrics: Sequence[str], out: Path) -> list[str]:
    """Draw a panel for each metric that a run has, a pale line for each run and a full one for its running mean; the names of
    those drawn.

    Raises:
        UsageError: a run has no metrics, or `out` cannot be written.
    """
    lines = {label: read(run / FILE) for label, run in zip(_labels(runs), runs, strict=True)}
    if out.suffix not in ENDINGS:
        raise UsageError(f"{out}: expected a picture's name, that ends in {', '.join(ENDINGS)}")
    if not out.parent.is_dir():
        raise UsageError(f"{out}: there is no directory {out.parent} to write it to; make it first")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [name for name in metrics if any(name in line for found in lines.values() for line in found)]
    columns = min(2, len(drawn)) or 1
    rows = max(1, -(-len(drawn) // columns))
    figure, panels = pyplot.subplots(rows, columns, figsize=(6 * columns, 3 * rows), squeeze=False, layout="constrained")
    for panel, name in zip(panels.flat, drawn, strict=False):
        for place, (run, found) in enumerate(lines.items()):
            points = [(line["step"], line[name]) for line in found if name in line]
            if points:
                steps, values = np.asarray(points, np.float64).T
                panel.plot(steps, values, color=f"C{place}", alpha=0.3, linewidth=1)
                panel.plot(steps, smoothed(values), color=f"C{place}", label=run)
        panel.set_title(name, loc="left", fontsize=10)
        panel.set_xlabel(f"step (full lines: mean of {SMOOTHED_OVER})")
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(panels.flat)[len(drawn) :]:
        panel.set_visible(False)
    if len(lines) > 1:
        panels.flat[0].legend(frameon=False)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)
    return drawn


def _labels(runs: Sequence[Path]) -> list[str]:
    """Names that tell runs apart: the folder's, or the whole path where folders have the same."""
    names = [run.name for run in runs]
    return [run.name if names.count(run.name) == 1 else str(run) for run in runs]


def smoothed(values: Float64Array) -> Float64Array:
    """Mean of each value and those before it, `SMOOTHED_OVER` at most; float64[n]."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - SMOOTHED_OVER)
    means: Float64Array = (sums[ends] - sums[starts]) / (ends - starts)
    return means
