"""`run(name, script, …)`: the rig with this test's directory and model."""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.harnesses.rig import Seen, run_harness

Run = Callable[..., Awaitable[Seen]]


@pytest.fixture
def run(tmp_path: Path, smollm2_dir: Path) -> Run:
    return partial(run_harness, tmp_path=tmp_path, model_dir=smollm2_dir)
