"""The documents name only what is there."""

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest
import typer
from tokenizers import Tokenizer
from typer.testing import CliRunner

from polar.cli import app
from polar.engines.renderers import NAMES, load_renderer
from polar.engines.scripted import Scripted, ScriptedEngine, scripted_server
from polar.engines.self_test import self_test
from polar.engines.vllm import VllmEngine
from polar.specs import ExcludedReason
from polar.tokens.drift import CODES
from polar.training.config import TrainConfig
from tests.audit.folders import make_run

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^\$? ?(polar .+?)(?: +#.*)?$")
EXPORTS = ROOT / "docs" / "exports.md"
ENGINES = ROOT / "docs" / "engines.md"


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


def test_every_setting_of_a_training_run_is_described() -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    for table in TrainConfig.__struct_fields__:
        section = text.split(f"| `[{table}]` |", 1)[1].split("\n\n", 1)[0]
        for setting in getattr(TrainConfig(), table).__struct_fields__:
            assert f"`{setting}`" in section, f"[{table}] {setting}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_anchor_is_a_heading(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
        headings = re.findall(r"^#+ (.+)$", (document.parent / target if target else document).read_text(), re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert anchor in anchors, f"{document.name} links to {target}#{anchor}"


def test_the_exports_are_written_as_they_stand_there(smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "runs" / "demo", smollm2_dir)
    monkeypatch.chdir(tmp_path)
    for command in [line for line in commands(EXPORTS) if line.startswith("polar export runs/demo ")]:
        told = CliRunner().invoke(app, shlex.split(command)[1:])
        assert told.exit_code == 0, f"{command}: {told.output}"
    files = {run.path / name for name in re.findall(r"^\| `\w+` \| `([\w.]+)`", EXPORTS.read_text(), re.MULTILINE)}
    assert [file for file in files if not file.exists()] == [run.path / "traces.safetensors"], "which was given another name"
    assert Path("demo.safetensors").exists()


def test_vllm_is_started_as_in_the_tests() -> None:
    started = "".join(path.read_text() for path in (ROOT / "tests" / "e2e").glob("*.py"))
    command = next(block for _, block in code_blocks(ENGINES.read_text()) if "vllm.entrypoints" in block)
    words = re.findall(r"--[a-z-]+|VLLM_\w+|vllm\.[\w.]+", command)
    assert len(words) == 6
    assert [word for word in words if word not in started] == []


def test_renderers_forks_and_reasons_are_those_of_the_code() -> None:
    rows = re.search(r"^\| `--renderer` \|.*?\n\n", ENGINES.read_text(), re.MULTILINE | re.DOTALL)
    assert rows is not None
    firsts = re.findall(r"^\| (?:a family \| )?(`.+?`) \|", rows[0], re.MULTILINE)
    assert set(re.findall(r"`([\w.-]+)`", " ".join(firsts))) - {"--renderer"} == {*NAMES, "none"}
    forks = re.findall(r"^\| (`[a-z_`, ]+`) \| .* \| (T\d\d) \|$", ENGINES.read_text(), re.MULTILINE)
    assert {name: code for names, code in forks for name in re.findall(r"\w+", names)} == dict(CODES)
    reasons = re.search(r"^\| reason \|.*?\n\n", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE | re.DOTALL)
    assert reasons is not None
    assert set(re.findall(r"^\| `(\w+)`", reasons[0], re.MULTILINE)) == set(get_args(ExcludedReason))


async def test_the_claims_are_those_of_the_self_test(smollm2_dir: Path) -> None:
    tokenizer, said = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json")), set()
    async with scripted_server(ScriptedEngine(tokenizer, lambda call: Scripted("ok"), model_dir=smollm2_dir)) as url:
        engine = VllmEngine(url)
        for renderer in (load_renderer(smollm2_dir), None):
            proved = await self_test(engine, await engine.info(), renderer)
            said |= {(proof.code, proof.says) for proof in proved.proofs}
        await engine.close()
    section = ENGINES.read_text().split("## The self-test")[1]
    claims = re.findall(r"^\| ([A-Z]\d\d) \| (.+?)(?:;.*| \(.*mode\)| \(token-in\))? \|$", section, re.MULTILINE)
    assert set(claims) == said


def test_the_readme_opens_with_the_two_commands() -> None:
    opening = (ROOT / "README.md").read_text().split("```")[1]
    assert [line.split("#")[0].strip() for line in opening.strip().splitlines()] == ["make demo", "make test"]
