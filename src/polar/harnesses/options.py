"""Checks of the options in a task's `harness`."""

from collections.abc import Sequence
from difflib import get_close_matches

from polar.errors import UsageError
from polar.specs import HarnessSpec


def check_options(spec: HarnessSpec, *, required: Sequence[str] = ()) -> None:
    """Refuse options other than `required`, and their absence.

    Raises:
        UsageError: naming the option and those that exist.
    """
    known = ", ".join(f"`{name}`" for name in required) or "none"
    for option in spec.options:
        if option not in required:
            raise UsageError(f"harness {spec.name!r} has no option {option!r}{meant(option, required)}; its options: {known}")
    for option in required:
        if not spec.options.get(option, "").strip():
            raise UsageError(f"harness {spec.name!r} needs the option {option!r}; its options: {known}")


def meant(name: str, known: Sequence[str]) -> str:
    """` (did you mean 'x'?)` if `name` is close to one of `known`, else an empty text."""
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
