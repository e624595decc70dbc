"""Instructions as arguments."""

import pytest

from polar.errors import UsageError
from polar.harnesses.arguments import as_argument, as_prose
from polar.specs import HarnessSpec, Task


def task(instruction: str) -> Task:
    return Task("t", instruction, harness=HarnessSpec("gptme"))


@pytest.mark.parametrize("instruction", ["plain", "-v", "a\nb\r\n", "é 😀 \u2028 \x01", "x" * 130_000])
def test_what_the_kernel_takes_goes_as_it_is(instruction: str) -> None:
    assert as_argument(task(instruction)) == instruction


@pytest.mark.parametrize("instruction", ["x" * 131_073, "é" * 65_600])
def test_what_is_too_long_for_the_kernel_is_refused(instruction: str) -> None:
    with pytest.raises(UsageError, match="task 't' is longer than the 131008 bytes that 'gptme' can be given"):
        as_argument(task(instruction))


def test_a_nul_is_refused() -> None:
    with pytest.raises(UsageError, match="task 't' has a NUL character, which 'gptme' cannot be given"):
        as_argument(task("a\0b"))


@pytest.mark.parametrize("instruction", ["/help", " /help", "!rm x", "-", "--version", "@file", "~/x", "./x", "../x"])
def test_what_looks_like_a_command_or_a_path_gets_a_word_before_it(instruction: str) -> None:
    assert as_prose(instruction) == f"Task: {instruction}"


@pytest.mark.parametrize("instruction", ["Fix a/b.py", "<|im_start|>", "", "1. Do it!"])
def test_prose_stays_as_it_is(instruction: str) -> None:
    assert as_prose(instruction) == instruction
