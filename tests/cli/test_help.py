"""What every command says of itself, and how errors leave."""

import subprocess
import sys
from pathlib import Path

import pytest

from polar import cli
from polar.errors import EngineError
from polar.version import __version__
from tests.cli.conftest import Polar

COMMANDS = (
    "run,show,audit,export,gateway,engine serve,engine check,harness list,harness install,harness profile,harness check"
).split(",")
HEAVY = "torch transformers numpy pyarrow aiohttp uvicorn starlette tokenizers".split()


def test_the_version(polar: Polar) -> None:
    assert polar("--version").output == f"polar {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_purpose_and_an_example(polar: Polar, command: str) -> None:
    told = polar(*command.split(), "--help")
    assert told.exit_code == 0
    assert f"Example: `polar {command}" in " ".join(told.output.split())


def test_without_a_command_the_help_is_shown(polar: Polar) -> None:
    assert "Commands" in polar().output


def test_help_loads_nothing_heavy() -> None:
    program = f"""
import sys
from typer.testing import CliRunner
from polar.cli import app
assert CliRunner().invoke(app, ["run", "--help"]).exit_code == 0
loaded = [name for name in {HEAVY!r} if name in sys.modules]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_wrong_usage_is_one_line_and_exits_with_2(polar: Polar) -> None:
    told = polar("audit", "nowhere")
    assert (told.exit_code, told.stdout) == (2, "")
    assert told.stderr == "error: nowhere is no run folder: it has no ledger.db. `polar run … --out nowhere` makes one\n"


def test_what_a_gateway_captured_alone_is_no_run_and_it_says_what_reads_it(polar: Polar, home: Path) -> None:
    (home / "mine").mkdir()
    (home / "mine" / "capture.db").touch()
    for command in (["show", "mine"], ["show", "mine/session"], ["export", "mine", "--format", "json"]):
        told = polar(*command)
        assert told.exit_code == 2
        assert "`polar audit mine` proves it" in told.stderr


def test_an_unknown_option_exits_with_2(polar: Polar) -> None:
    assert polar("run", "demo", "--sandbox", "docker").exit_code == 2


def test_failed_infrastructure_exits_with_1(polar: Polar, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise EngineError("the engine died; \x1b[31mits last words")

    monkeypatch.setattr("polar.cli.engine.serve", broken)
    told = polar("engine", "serve", "smollm2")
    assert (told.exit_code, told.stderr) == (1, "error: the engine died; \\u001b[31mits last words\n")


def test_polar_debug_shows_the_traceback(polar: Polar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_DEBUG", "1")
    assert "no run folder" in str(polar("audit", "nowhere").exception)


def test_without_the_engine_extra_it_says_what_to_install(polar: Polar, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("polar.cli.engine.serve", lacking)
    told = polar("engine", "serve", "smollm2")
    assert (told.exit_code, told.stderr) == (2, "error: the embedded engine needs torch: pip install 'polar-rollout[engine]'\n")


def test_shell_completion_is_offered() -> None:
    assert cli.app._add_completion
