"""An instruction as one argument of a program, for those that read none from a file or from standard input."""

from polar.errors import UsageError
from polar.specs import Task

_LONGEST = 128 * 1024 - 64  # bytes that the kernel takes for one argument, less what a preset writes before it
_SIGNS = ("/", "!", "-", "@", "~", ".")


def as_argument(task: Task) -> str:
    """The instruction of `task`, as it is.

    Raises:
        UsageError: the kernel does not take it: too long, or with a NUL character.
    """
    text = task.instruction
    if "\0" in text:
        raise UsageError(f"the instruction of task {task.id!r} has a NUL character, which {task.harness.name!r} cannot be given")
    if len(text.encode()) > _LONGEST:
        raise UsageError(
            f"the instruction of task {task.id!r} is longer than the {_LONGEST} bytes that {task.harness.name!r} can be given"
        )
    return text


def as_prose(instruction: str) -> str:
    """`instruction` behind a word of ours where its first character would make a program take it for a command or a path."""
    return f"Task: {instruction}" if instruction.lstrip().startswith(_SIGNS) else instruction
