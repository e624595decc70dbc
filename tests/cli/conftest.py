"""The command line on finished runs, and before a scripted engine in a process of its own."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from polar.cli import app
from polar.rollout.folder import RunFolder
from tests.audit.folders import make_run

Polar = Callable[..., Result]

SCRIPT = '''
from itertools import count

from polar.engines.scripted import Scripted, ScriptedCall

NUMBERS = count()

def reply(call: ScriptedCall) -> Scripted:
    """Right and wrong in turn; slowly where the task asks for it."""
    text = "The answer is 42." if next(NUMBERS) % 2 else "I do not know."
    return Scripted(text, delay_per_token=0.15 if "slowly" in call.prompt_text else 0.0)
'''


@pytest.fixture(scope="session")
def finished(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run of `tests.audit.folders`; never changed."""
    return make_run(tmp_path_factory.mktemp("cli") / "run", smollm2_dir)


@pytest.fixture
def run(finished: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of its own, below `runs/` of the working directory."""
    return RunFolder(Path(shutil.copytree(finished.path, tmp_path / "runs" / "one")))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test works in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("POLAR_DEBUG", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def polar() -> Polar:
    """Call the command line in this process: `polar("show", run)`."""

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return call


@pytest.fixture(scope="session")
def engine_url(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scripted engine."""
    home = tmp_path_factory.mktemp("engine")
    (home / "cliscript.py").write_text(SCRIPT)
    options = ["--model-dir", str(smollm2_dir), "--script", "cliscript:reply", "--log", str(home / "sampled.jsonl")]
    process = start("-m", "polar.engines.scripted", *options, cwd=home, PYTHONPATH=str(home))
    assert process.stdout is not None
    yield process.stdout.readline().split()[4]
    process.terminate()
    process.wait()


def start(*arguments: str, cwd: Path, **environment: str) -> "subprocess.Popen[str]":
    """A Python process with its output piped."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell without job control makes its children deaf to Ctrl-C, and what they start inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def start_polar(*arguments: object, cwd: Path, **environment: str) -> "subprocess.Popen[str]":
    """`polar …` as a process."""
    return start("-c", "from polar.cli import app; app()", *map(str, arguments), cwd=cwd, **environment)
