"""The model families of the library `renderers`, loaded where one is used: it brings a second of imports along."""

from typing import Protocol

from polar.tokens.families import Family, Library, LibraryTokenizer, Make
from polar.tokens.tagged import Tags
from polar.tokens.xmlcalls import ARG_KEY, DSML, FUNCTION, INVOKE, Grammar


class _Configs(Protocol):
    """The library's class of one family's configurations."""

    def template_field_names(self) -> frozenset[str]: ...

    def model_validate(self, fields: dict[str, object]) -> object: ...


_TAGS = Tags("<tool_call>", "</tool_call>")
_DEEPSEEK = Tags("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DSML = Tags("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
_KIMI = Tags("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_MINIMAX = Tags("<minimax:tool_call>", "</minimax:tool_call>")
_HY3 = Tags("<tool_calls:opensource>", "</tool_calls:opensource>", "<think:opensource>", "</think:opensource>")
_LLAMA = Tags("{", think="", think_end="", bare=True)


def _with_json(name: str) -> Family:
    return Family(name, raw_arguments=True)


def _with_xml(name: str, grammar: Grammar) -> Family:
    return Family(name, tags=_TAGS, grammar=grammar)


def _deepseek(name: str) -> Family:
    return Family(name, _DEEPSEEK.call, _DEEPSEEK, raw_arguments=True)


def _kimi(name: str) -> Family:
    return Family(name, _KIMI.call, _KIMI, raw_arguments=True, names_results=True, numbers_calls=True)


# Not here: gpt-oss, whose prompts another library encodes with a vocabulary of its own, out of reach of the guard (T12);
# gemma4, whose vocabulary is no byte-level BPE; inkling, whose replies have no tags; laguna-xs.2 and laguna-m.1, whose bridges
# in the library leave out a line end (tokens.stability found it).
FAMILIES = (
    _with_json("qwen3"),
    _with_json("qwen3-vl"),
    _with_xml("qwen3.5", FUNCTION),
    _with_xml("qwen3.6", FUNCTION),
    _with_xml("qwen3.8", FUNCTION),
    _with_xml("prime-qwen3", FUNCTION),
    Family("llama-3", "<|eom_id|>", _LLAMA),
    _deepseek("deepseek-v3"),
    _deepseek("deepseek-r1"),
    Family("deepseek-v4", "｜DSML｜", _DSML, DSML),
    _with_xml("glm-4.5", ARG_KEY),
    _with_xml("glm-5", ARG_KEY),
    _with_xml("glm-5.1", ARG_KEY),
    _with_xml("glm-5.3", ARG_KEY),
    _kimi("kimi-k2"),
    _kimi("kimi-k2.5"),
    Family("minimax-m2", _MINIMAX.call, _MINIMAX, INVOKE),
    _with_xml("nemotron-3", FUNCTION),
    _with_xml("nemotron-3-ultra", FUNCTION),
    _with_xml("nemotron-3.5", FUNCTION),
    Family("hy3", _HY3.call, _HY3),
    _with_xml("laguna-xs-2.1", ARG_KEY),
    _with_xml("laguna-s-2.1", ARG_KEY),
)

# Whose model directory may come without a chat template, by the `model_type` of its configuration.
OF_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_vl": "qwen3-vl",
    "qwen3_vl_moe": "qwen3-vl",
    "qwen3_5": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
    "deepseek_v3": "deepseek-v3",
    "deepseek_v4": "deepseek-v4",
    "glm4_moe": "glm-4.5",
    "minimax_m2": "minimax-m2",
}

# What has a whole rendering keep earlier reasoning, where a family can: a fork is then as near to what was sampled as may be.
_KEEPING: dict[str, bool | str] = {
    "preserve_thinking": True,
    "preserved_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}
_FIXED: dict[str, bool | str] = {"date_string": "26 Jul 2024"}  # a date in a prompt is the same every day


def settings(family: str, *, keeps: bool = True) -> dict[str, bool | str]:
    """How a family's template is set, by the template's own names; it `keeps` earlier reasoning, or has its own way."""
    wanted = {**_KEEPING, **_FIXED} if keeps else _FIXED
    return {name: value for name, value in wanted.items() if name in _config_class(family).template_field_names()}


def maker(family: str, thinks: bool | None = None, *, keeps: bool = True) -> Make:
    """What makes a renderer of the library.

    Args:
        thinks: whether replies begin with reasoning; None for the family's default.
        keeps: a whole rendering keeps earlier reasoning; otherwise the template's own rules hold.
    """
    from renderers import create_renderer

    kind = _config_class(family)
    chosen = settings(family, keeps=keeps)
    if keeps:
        chosen["thinking_retention"] = "all"
    if thinks is not None:
        chosen["enable_thinking"] = thinks
    config = kind.model_validate({"name": family, **chosen})

    def make(tokenizer: LibraryTokenizer) -> Library:
        library: Library = create_renderer(tokenizer, config)
        return library

    return make


def can_choose_thinking(family: str) -> bool:
    """Whether the family's template can be told not to reason."""
    return "enable_thinking" in _config_class(family).template_field_names()


def library_version() -> str:
    """The version of the library, part of a renderer's name."""
    from renderers import __version__

    return str(__version__)


def _config_class(family: str) -> _Configs:
    from renderers import config_from_name

    kind: _Configs = config_from_name(family).__class__
    return kind
