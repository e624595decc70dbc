"""A finished run, and copies of it to damage."""

import shutil
from pathlib import Path

import pytest

from polar.engines.renderers import load_renderer
from polar.rollout.folder import RunFolder
from polar.tokens.rendering import Renderer
from tests.audit.folders import make_run


@pytest.fixture(scope="session")
def finished(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Made once; never changed."""
    return make_run(tmp_path_factory.mktemp("audit") / "run", smollm2_dir)


@pytest.fixture
def run(finished: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of its own for each test."""
    return RunFolder(Path(shutil.copytree(finished.path, tmp_path / "run")))


@pytest.fixture(scope="session")
def renderer(smollm2_dir: Path) -> Renderer:
    return load_renderer(smollm2_dir)
