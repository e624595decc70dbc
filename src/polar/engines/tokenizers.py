"""Loads the tokenizer of a model directory. Needs neither torch nor transformers."""

from pathlib import Path

import msgspec
import tokenizers
from msgspec import Struct

from polar.errors import UsageError
from polar.tokens.tokenizer import Tokenizer


class _AddedToken(Struct):
    content: str
    special: bool = False


class _Config(Struct):
    """The part of `tokenizer_config.json` that adds to `tokenizer.json`."""

    eos_token: str | _AddedToken | None = None
    added_tokens_decoder: dict[int, _AddedToken] = {}


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model directory, with the added tokens and the EOS of its configuration.

    Raises:
        UsageError: `tokenizer.json` or `tokenizer_config.json` is missing or unreadable, or they contradict each other.
    """
    config = _read_config(model_dir / "tokenizer_config.json")
    loaded = _read_tokenizer(model_dir / "tokenizer.json")
    for id, token in sorted(config.added_tokens_decoder.items()):
        _ensure_added(loaded, id, token, model_dir)
    eos = config.eos_token
    return Tokenizer(loaded, eos.content if isinstance(eos, _AddedToken) else eos)


def _read_config(path: Path) -> _Config:
    try:
        return msgspec.json.decode(_read(path), type=_Config)
    except msgspec.DecodeError as fault:
        raise UsageError(f"expected a Hugging Face tokenizer configuration in {path}: {fault}") from fault


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    content = _read(path)
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as fault:  # the library raises no narrower type
        raise UsageError(f"expected a Hugging Face tokenizer in {path}: {fault}") from fault


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as fault:
        raise UsageError(
            f"expected {path.name} in the model directory {path.parent}: {fault.strerror}. "
            "Name a directory that holds the model's tokenizer in Hugging Face form"
        ) from fault


def _ensure_added(loaded: tokenizers.Tokenizer, id: int, token: _AddedToken, model_dir: Path) -> None:
    """Add a token that only the configuration lists, as transformers does."""
    if token.content not in {known.content for known in loaded.get_added_tokens_decoder().values()}:
        loaded.add_tokens([tokenizers.AddedToken(token.content, special=token.special, normalized=False)])
    if loaded.token_to_id(token.content) != id:
        raise UsageError(
            f"{model_dir}: tokenizer_config.json gives {token.content!r} the id {id}, "
            f"but in tokenizer.json it is {loaded.token_to_id(token.content)}; take both files from one model"
        )
