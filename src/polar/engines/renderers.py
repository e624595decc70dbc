"""Chooses the renderer of a model directory.

A family is chosen only for a model whose own chat template says the same, to the id, on probe dialogues: a model that was
trained further may have another. What no family fits is rendered as ChatML where its template agrees, else by the template
itself where that is stable, else not at all: then the engine has to render (chat mode).
"""

from collections.abc import Iterator
from datetime import datetime
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from msgspec import Struct

from polar.engines.families import FAMILIES, OF_MODEL_TYPE, can_choose_thinking, library_version, maker, settings
from polar.engines.tokenizers import load_tokenizer
from polar.errors import InvalidRequest, UsageError
from polar.tokens.chatml import END, START, ChatMLRenderer
from polar.tokens.families import Family, FamilyRenderer
from polar.tokens.rendering import Renderer
from polar.tokens.stability import LONG, PLAIN, WITH_TOOLS, breaks
from polar.tokens.template import ASK, ChatTemplate, TemplateRenderer

_BY_NAME = {family.name: family for family in FAMILIES}
NAMES = ("auto", "chatml", "template", *_BY_NAME)
CHAT_MODE = "serve it in chat mode, in which the engine renders (--renderer none)"


class _NamedTemplate(Struct):
    name: str
    template: str


class _Token(Struct):
    content: str


class _Config(Struct):
    """The part of `tokenizer_config.json`, `chat_template.json` and `config.json` that says how to render."""

    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    model_type: str = ""


class _Model:
    """A model directory, as far as rendering goes."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.tokenizer = load_tokenizer(place)
        self.config = _read(place / "tokenizer_config.json")
        self.source = self._source()
        self._vocabulary = (place / "tokenizer.json").read_bytes()

    @cached_property
    def template(self) -> ChatTemplate | None:
        return self.template_with({}) if self.source else None

    def template_with(self, names: dict[str, bool | str]) -> ChatTemplate:
        config = self.config
        tokens = {"bos_token": config.bos_token, "eos_token": config.eos_token, "pad_token": config.pad_token}
        spelled = {name: token.content if isinstance(token, _Token) else token for name, token in tokens.items() if token}
        return ChatTemplate(self.source, {**spelled, **names}, lambda form: datetime.now().strftime(form))

    def identity(self, *others: str) -> str:
        """Tells this vocabulary, and what else decides over ids, from others."""
        return xxhash.xxh3_64_hexdigest(self._vocabulary + "\0".join(others).encode())

    def _source(self) -> str:
        try:
            return (self.place / "chat_template.jinja").read_text()
        except FileNotFoundError:
            pass
        template = self.config.chat_template or _read(self.place / "chat_template.json", needed=False).chat_template or ""
        if isinstance(template, str):
            return template
        by_name = {named.name: named.template for named in template}
        return by_name.get("tool_use") or by_name.get("default") or ""


def load_renderer(model_dir: Path, name: str = "auto") -> Renderer:
    """The renderer for the model in a Hugging Face directory; its name tells it from one of another vocabulary.

    Args:
        name: `auto`, `chatml`, `template`, or a family; see `NAMES`.

    Raises:
        UsageError: files are missing, there is no such renderer, or it does not fit the model.
    """
    if name not in NAMES:
        raise UsageError(f"expected none or a renderer of {', '.join(NAMES)}; got {name!r}")
    model = _Model(model_dir)
    if name == "chatml":
        return _chatml(model)
    if name == "template":
        return _template(model)
    if name != "auto":
        return _family(model, _BY_NAME[name])
    return _chosen(model)


def _chosen(model: _Model) -> Renderer:
    if model.template is None:
        kind = _read(model.place / "config.json", needed=False).model_type
        if kind in OF_MODEL_TYPE:
            return _family(model, _BY_NAME[OF_MODEL_TYPE[kind]])
        return _chatml(model)
    for family in FAMILIES:
        if (found := next(_agreeing(model, family), None)) is not None:
            return found
    try:
        chatml = _chatml(model)
    except UsageError:
        return _template(model)
    own = TemplateRenderer(model.tokenizer, model.template)
    return chatml if _agree(chatml, own, tools=own.shows_tools) else _template(model)


def _family(model: _Model, family: Family) -> FamilyRenderer:
    """The family's renderer, as the model's template has it if it agrees with one, else by the family's defaults."""
    found = next(_agreeing(model, family), None) or _variant(model, family, None)
    if fatal := [found_break for found_break in breaks(found) if found_break.fatal]:
        first = fatal[0]
        raise UsageError(f"{model.place}: {family.name} cannot be used: {first.why} ({first.dialogue}); {CHAT_MODE}")
    return found


def _agreeing(model: _Model, family: Family) -> Iterator[FamilyRenderer]:
    """The family's renderers that say what the model's template says."""
    if model.template is None or model.tokenizer.token_id(family.marker) is None:
        return
    for thinks in (None, True, False) if can_choose_thinking(family.name) else (None,):
        try:
            renderer = _variant(model, family, thinks)
            own = TemplateRenderer(model.tokenizer, model.template_with(settings(family.name)))
        except UsageError:
            return
        if _shows_tools(own) == renderer.shows_tools and _agree(renderer, own, tools=renderer.shows_tools):
            yield renderer


def _variant(model: _Model, family: Family, thinks: bool | None) -> FamilyRenderer:
    version = library_version()
    identity = f"{version}-{model.identity(f'{settings(family.name)} {thinks}')}"
    as_sent = maker(family.name, thinks, keeps=False)
    return FamilyRenderer(model.tokenizer, family, maker(family.name, thinks), identity, as_sent)


def _agree(renderer: Renderer, own: TemplateRenderer, *, tools: bool) -> bool:
    """Whether a renderer gives the ids of the model's own template on the probe dialogues."""
    try:
        return all(
            np.array_equal(renderer.render(messages, dialogue.tools), own.as_written(messages, dialogue.tools))
            for dialogue in ((PLAIN, WITH_TOOLS, LONG) if tools else (PLAIN,))
            for messages in (dialogue.messages, dialogue.messages[:2])
        )
    except InvalidRequest:
        return False


def _shows_tools(own: TemplateRenderer) -> bool:
    """Whether the template writes tools at all."""
    try:
        return not np.array_equal(own.as_written(PLAIN.messages[:2], WITH_TOOLS.tools), own.as_written(PLAIN.messages[:2], ()))
    except InvalidRequest:
        return False


def _chatml(model: _Model) -> Renderer:
    if model.tokenizer.token_id(START) is None or model.tokenizer.token_id(END) is None:
        raise UsageError(
            f"{model.place}: no renderer for this model: none of {', '.join(_BY_NAME)} fits its vocabulary and chat template, "
            f"and it does not speak ChatML ({START}, {END}). Name one (--renderer), or {CHAT_MODE}"
        )
    system = _default_system(model)
    return ChatMLRenderer(model.tokenizer, system, model.identity(system) if system else model.identity())


def _default_system(model: _Model) -> str:
    """The system message that the model's own template adds to a history without one, "" for none."""
    if model.template is None:
        return ""
    try:
        text = model.template.render([ASK])
    except InvalidRequest as fault:
        raise UsageError(f"{model.place}: {fault}") from None
    opening = f"{START}system\n"
    return text.split(opening, 1)[1].split(END, 1)[0] if opening in text else ""


def _template(model: _Model) -> Renderer:
    if model.template is None:
        raise UsageError(f"{model.place}: the model has no chat template; name a renderer, or {CHAT_MODE}")
    renderer = TemplateRenderer(model.tokenizer, model.template, model.identity(model.source))
    if fatal := [found for found in breaks(renderer) if found.fatal]:
        first = fatal[0]
        raise UsageError(
            f"{model.place}: by its chat template, what follows a reply depends on more than that follows it "
            f"({first.dialogue}, message {first.message}: {first.why}); {CHAT_MODE}"
        )
    return renderer


def _read(path: Path, *, needed: bool = True) -> _Config:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Config)
    except FileNotFoundError:
        if needed:
            raise UsageError(f"expected {path.name} in the model directory {path.parent}; it is not there") from None
        return _Config()
    except msgspec.DecodeError as fault:
        raise UsageError(f"expected a configuration in {path}: {fault}") from fault
