"""What all tests share."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("shared-cores", deadline=None)  # an example may have to wait for a core
settings.load_profile("shared-cores")

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads: spinning threads starve their neighbours
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("POLAR_CACHE", str(Path.home() / ".cache" / "polar"))


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Where heavy downloads are kept between runs, outside the clone."""
    path = Path(os.environ["POLAR_CACHE"])
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2's model directory, made once from a PyPI package."""
    from polar.engines.embedded.models import resolve  # here: the environment above is set by now

    return resolve("smollm2")


SCRIPT = """
from polar.engines.scripted import Scripted, ScriptedCall

def reply(call: ScriptedCall) -> Scripted:
    return Scripted("ok")
"""


@pytest.fixture
def engine_command(smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The scripted engine, which announces itself as the embedded one does and starts faster."""
    (tmp_path / "myscript.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    options = ["--model-dir", str(smollm2_dir), "--script", "myscript:reply", "--log", str(tmp_path / "sampled.jsonl")]
    return [sys.executable, "-m", "polar.engines.scripted", *options]
