"""The documents name only what is there."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from polar.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^\$? ?(polar .+?)(?: +#.*)?$")


def code_blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of each fenced block."""
    parts = re.split(r"^```(.*)\n", text, flags=re.MULTILINE)
    return [(parts[place], parts[place + 1]) for place in range(1, len(parts) - 1, 4)]


def commands(document: Path) -> list[str]:
    """Lines of code blocks, and code in running text, that call `polar`."""
    text = document.read_text()
    lines = [line for _, block in code_blocks(text) for line in block.splitlines()]
    spans = re.findall(r"`(polar [^`]+)`", text)
    found = [match[1] for line in [*lines, *spans] if (match := COMMAND.match(line.strip()))]
    return [command for command in found if "…" not in command and "ready on" not in command]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_is_one_that_the_command_line_takes(document: Path) -> None:
    for line in commands(document):
        command = typer.main.get_command(app)
        words = shlex.split(line)[1:]
        while words and not words[0].startswith("-") and (below := getattr(command, "commands", None)):
            assert words[0] in below, line
            command, words = below[words[0]], words[1:]
        if words and words != ["--version"]:
            command.make_context(line, words)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_readme_opens_with_the_two_commands() -> None:
    opening = (ROOT / "README.md").read_text().split("```")[1]
    assert [line.split("#")[0].strip() for line in opening.strip().splitlines()] == ["make demo", "make test"]
