"""What all tests share."""

import os
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
