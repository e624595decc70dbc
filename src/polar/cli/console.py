"""Where output goes, and what may be in it.

What harnesses, models and task files wrote is untrusted: it is shown as text, never as rich's markup, and never as what a
terminal would obey.
"""

import logging
import os
import re

from rich.console import Console
from rich.text import Text

PIPED_WIDTH = 140  # columns where nobody says how wide a page is

# Steers a terminal (C0, C1), turns text around (bidi), or cannot be written at all (lone surrogates).
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def output(stderr: bool = False) -> Console:
    """The console for results, or for what goes to stderr."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console


def visible(text: str) -> str:
    """`text` with every character spelled out that would do something else than be seen; newlines and tabs stay."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def plain(text: str, style: str = "") -> Text:
    """Untrusted text, ready to print."""
    return Text(visible(text), style)


def complain(message: str) -> None:
    """Say what went wrong, on stderr, however long the line."""
    output(stderr=True).print(plain(message, "red"), soft_wrap=True)


def log_warnings() -> None:
    """Show what the program logs: warnings, as lines on stderr."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Lines()])


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        output(stderr=True).print(plain(self.format(record), "yellow"), soft_wrap=True)


def count(number: int) -> str:
    """A number of something, with thousands set off."""
    return f"{number:,}"
