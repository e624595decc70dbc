"""`polar harness check`: what is told, where, and with which exit status."""

from pathlib import Path

import pytest

from polar import harnesses
from polar.cli.checked import END, START
from tests.cli.conftest import Polar

GOOD, LAZY, UNPACKED = (f"tests.rollout.probed:{name}" for name in ("Good", "Lazy", "Unpacked"))


@pytest.mark.usefixtures("smollm2_dir")
def test_each_is_described_and_one_that_fails_does_not_stop_the_others(polar: Polar) -> None:
    told = polar("harness", "check", UNPACKED, LAZY, GOOD)
    lines = told.output.splitlines()
    assert told.exit_code == 1, told.output
    assert lines[:2] == ["fetching it", "good 1.0: no network: check the connection and try again"]
    assert "good 1.0: hello.txt is missing; one.txt is missing; two.txt is missing" in lines
    assert any(line.startswith("  what happened: polar show /") for line in lines)
    assert lines[-5] == "good 1.0: ok"
    assert lines[-4].startswith("  openai_chat, streamed: no · calls: 3 agent, the first of ")
    assert lines[-3:] == [
        "  files: 3 of 3 · traces: 1, breaks: – · tool-call ids back: 3 of 3, other ids: 0",
        "  not served: – · unknown routes: –",
        "1 of 3 harnesses work",
    ]


@pytest.mark.usefixtures("smollm2_dir")
def test_markdown_goes_to_stdout_alone(polar: Polar) -> None:
    told = polar("harness", "check", GOOD, "--markdown")
    assert told.exit_code == 0, told.output
    head, rule, row = told.stdout.splitlines()
    assert head.startswith("| harness | version | installed | API |")
    assert head.count("|") == rule.count("|") == row.count("|")
    assert row.startswith("| `good` | 1.0 | – | openai_chat | no | 3 |")
    assert row.endswith("| 3 of 3 | 0 | – | – | ok |")
    assert "1 of 1 harnesses work" in told.stderr


@pytest.mark.usefixtures("smollm2_dir")
def test_a_document_gets_the_new_rows_and_keeps_the_others(polar: Polar, home: Path) -> None:
    document = home / "page.md"
    document.write_text(f"# Page\n{START}\n| old |\n| `good` | stale |\n| `other` | kept |\n{END}\nthe rest\n")
    assert polar("harness", "check", GOOD, "--write", document).exit_code == 0
    lines = document.read_text().splitlines()
    assert lines[:2] == ["# Page", START]
    assert lines[2].startswith("| harness |")
    assert lines[4].startswith("| `good` | 1.0 |")
    assert lines[5:] == ["| `other` | kept |", END, "the rest"]


def test_a_document_without_a_place_for_the_table_is_refused_before_anything_runs(polar: Polar, home: Path) -> None:
    (home / "page.md").write_text(START)
    told = polar("harness", "check", GOOD, "--write", home / "page.md")
    assert (told.exit_code, told.stdout) == (2, "")
    assert "between which the table goes" in told.stderr
    assert "No such file" in polar("harness", "check", GOOD, "--write", home / "none.md").stderr


@pytest.mark.parametrize("arguments", [[], ["pi", "--all"], ["pi", "--installed-only"]])
def test_either_names_or_all(polar: Polar, arguments: list[str]) -> None:
    told = polar("harness", "check", *arguments)
    assert (told.exit_code, told.stdout) == (2, "")
    assert "name the harnesses to check, or say --all" in told.stderr


def test_one_without_a_probe_or_a_name_that_does_not_exist_is_refused(polar: Polar) -> None:
    assert "'shell' has no probe to check it with" in polar("harness", "check", GOOD, "shell").stderr
    assert "there is no harness 'p1'" in polar("harness", "check", GOOD, "p1").stderr


def test_nothing_installed_is_said(polar: Polar, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("POLAR_CACHE", str(home / "cache"))
    told = polar("harness", "check", "--all", "--installed-only")
    assert (told.exit_code, told.stdout) == (2, "")
    assert "no harness is installed in" in told.stderr
    assert "leave out --installed-only" in told.stderr


def test_every_harness_but_shell_has_a_probe() -> None:
    assert [name for name in harnesses.names() if not harnesses.get(name).probe] == ["shell"]


def test_the_document_says_how_every_harness_is_set_up() -> None:
    text = (Path(__file__).parents[2] / "docs" / "harnesses.md").read_text()
    assert [name for name in harnesses.names() if f"\n**`{name}`**" not in text] == []
    assert text.count(START) == text.count(END) == 1
