"""Chooses the renderer of a model directory."""

from datetime import datetime
from pathlib import Path

import jinja2
import msgspec
import xxhash
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from polar.engines.tokenizers import load_tokenizer
from polar.errors import UsageError
from polar.tokens.chatml import END, START, ChatMLRenderer
from polar.tokens.rendering import Renderer


class _Config(Struct):
    chat_template: str | None = None


def load_renderer(model_dir: Path) -> Renderer:
    """The renderer for the model in a Hugging Face directory; its name tells it from one of another vocabulary.

    Raises:
        UsageError: files are missing, or the model's family has no renderer.
    """
    tokenizer = load_tokenizer(model_dir)
    if tokenizer.token_id(START) is None or tokenizer.token_id(END) is None:
        raise UsageError(f"{model_dir}: no renderer for this model family; there is one for ChatML models ({START}, {END})")
    system = _default_system(model_dir)
    identity = xxhash.xxh3_64_hexdigest((model_dir / "tokenizer.json").read_bytes() + system.encode())
    return ChatMLRenderer(tokenizer, system, identity)


def _default_system(model_dir: Path) -> str:
    """The system message that the model's own template adds to a history without one, "" for none."""
    template = _template(model_dir)
    if not template:
        return ""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["raise_exception"] = _refuse
    try:
        text = environment.from_string(template).render(messages=[{"role": "user", "content": "?"}], add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise UsageError(f"{model_dir}: its chat template cannot be rendered: {error}") from None
    opening = f"{START}system\n"
    return text.split(opening, 1)[1].split(END, 1)[0] if opening in text else ""


def _template(model_dir: Path) -> str:
    try:
        return (model_dir / "chat_template.jinja").read_text()
    except FileNotFoundError:
        return msgspec.json.decode((model_dir / "tokenizer_config.json").read_bytes(), type=_Config).chat_template or ""


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
