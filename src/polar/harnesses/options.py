"""Checks of the options in a task's `harness`."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from polar.errors import UsageError
from polar.specs import HarnessSpec


def check_options(spec: HarnessSpec, *, required: Sequence[str] = (), choices: Mapping[str, Sequence[str]] = {}) -> None:
    """Refuse options other than `required` and `choices`, the absence of what is required, and values not to be chosen.

    Args:
        choices: options that may be left out, name → values; the first is the default.

    Raises:
        UsageError: naming the option, and those or the values that exist.
    """
    names = (*required, *choices)
    known = ", ".join(f"`{name}`" for name in names) or "none"
    for option, value in spec.options.items():
        if option not in names:
            raise UsageError(f"harness {spec.name!r} has no option {option!r}{meant(option, names)}; its options: {known}")
        if option in choices and value not in choices[option]:
            values = " or ".join(f"`{each}`" for each in choices[option])
            raise UsageError(f"harness {spec.name!r}: option {option!r} is {values}, not {value!r}")
    for option in required:
        if not spec.options.get(option, "").strip():
            raise UsageError(f"harness {spec.name!r} needs the option {option!r}; its options: {known}")


def chosen(spec: HarnessSpec, option: str, choices: Mapping[str, Sequence[str]]) -> str:
    """The value of an option that `check_options` has checked against `choices`."""
    return spec.options.get(option, choices[option][0])


def meant(name: str, known: Sequence[str]) -> str:
    """` (did you mean 'x'?)` if `name` is close to one of `known`, else an empty text."""
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
