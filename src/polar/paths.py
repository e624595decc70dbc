"""Where Polar keeps what it can make again."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$POLAR_CACHE`, or `~/.cache/polar`; not created here."""
    return Path(os.environ.get("POLAR_CACHE") or "~/.cache/polar").expanduser()
