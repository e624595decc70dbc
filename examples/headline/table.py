"""What run.sh measured, as a Markdown table: `python examples/headline/table.py`."""

from pathlib import Path

from polar.training.evaluation import gain, read
from polar.training.intervals import Interval


def shown(interval: Interval, sign: str = "") -> str:
    """Percent, with its 95 % interval."""
    value, low, high = (format(100 * each, f"{sign}.1f") for each in interval)
    return f"{value} [{low}, {high}]"


def main() -> None:
    print("| harness | before | after GRPO | gain | control | gain of the control |\n|---|---|---|---|---|---|")
    for folder in sorted(Path("runs/headline").iterdir()):
        harness = folder.name
        if not (folder / "control-after").is_dir():
            continue
        before, after, control = (read(folder / name)[harness] for name in ("before", "after", "control-after"))
        cells = [shown(before.pass_at_1), shown(after.pass_at_1), shown(gain(before, after), "+")]
        cells += [shown(control.pass_at_1), shown(gain(before, control), "+")]
        print(f"| {harness} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
