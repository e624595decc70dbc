"""Tool calls whose arguments stand between tags, as text: Qwen3.5's, GLM's, MiniMax's and their like.

Their values are read verbatim, for an edit's leading spaces matter; only the line end that a template puts on each side of a
value is none of it. Such text has no types, so they come from the tool's schema: what is declared a string stays one, all else
is read as JSON (or as Python writes it: `True`), and a value that is nothing of that goes out as the text it is.
Reading takes linear time.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Struct

from polar.chat import Tool
from polar.tokens.hermes import json_object
from polar.tokens.rendering import Attempt

_PYTHON = {"True": True, "False": False, "None": None}
_KINDS: tuple[tuple[type, frozenset[str]], ...] = (
    (bool, frozenset({"boolean"})),
    (int, frozenset({"integer", "number"})),
    (float, frozenset({"number"})),
    (str, frozenset({"string"})),
    (list, frozenset({"array"})),
    (dict, frozenset({"object"})),
    (type(None), frozenset({"null"})),
)


class Grammar(Struct, frozen=True):
    """Patterns of a call: its head (a group: the name), each argument (`name`, `value`, perhaps `string`), and its end."""

    head: str
    argument: str
    end: str


FUNCTION = Grammar(
    r"\s*<function=([^>\n]+)>",
    r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))",
    r"\s*</function>\s*",
)
ARG_KEY = Grammar(
    r"\s*([^<\s](?:[^<\n]*[^<\s])?)\s*(?=<arg_key>|\Z)",
    r"\s*<arg_key>(?P<name>[^<\n]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))",
    r"\s*\Z",
)
INVOKE = Grammar(
    r'\s*<invoke name="([^"\n]+)">',
    r'\s*<parameter name="(?P<name>[^"\n]+)">(?P<value>.*?)</parameter>(?=\s*(?:<parameter name=|</invoke>))',
    r"\s*</invoke>\s*",
)
DSML = Grammar(
    r'\s*<｜DSML｜invoke name="([^"\n]+)">',
    r'\s*<｜DSML｜parameter name="(?P<name>[^"\n]+)" string="(?P<string>true|false)">'
    r"(?P<value>.*?)</｜DSML｜parameter>(?=\s*(?:<｜DSML｜parameter name=|</｜DSML｜invoke>))",
    r"\s*</｜DSML｜invoke>\s*",
)


def reader(grammar: Grammar, tools: Sequence[Tool]) -> Callable[[str | None], list[Attempt]]:
    """What reads the calls in a block: what stands between its tags, or None where it was not closed."""
    schemas = {tool.name: _properties(tool) for tool in tools}
    return lambda block: _attempts(grammar, block, schemas)


def _attempts(grammar: Grammar, block: str | None, schemas: Mapping[str, Mapping[str, object]]) -> list[Attempt]:
    """All calls in a block; none where it holds anything else."""
    calls: list[Attempt] = []
    at = 0
    while block is not None and at < len(block):
        start, arguments = at, dict[str, object]()
        if (head := re.compile(grammar.head).match(block, at)) is None:
            return []
        name, at = head[1].strip(), head.end()
        while found := re.compile(grammar.argument, re.DOTALL).match(block, at):
            key = found["name"].strip()
            arguments[key] = _value(found, schemas.get(name, {}).get(key))
            at = found.end()
        if (end := re.compile(grammar.end).match(block, at)) is None:
            return []
        at = end.end()
        calls.append(Attempt(name, json_object(arguments), block[start:at]))
    return calls


def _value(found: re.Match[str], schema: object) -> object:
    declared = found.groupdict().get("string")  # by the model itself
    return found["value"] if declared == "true" else _typed(found["value"], {} if declared else schema)


def _typed(text: str, schema: object) -> object:
    allowed = _types(schema)
    if allowed == {"string"}:
        return text
    source = text.strip()
    try:
        value = _PYTHON[source] if source in _PYTHON else msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return text
    kinds = next((kinds for kind, kinds in _KINDS if type(value) is kind), frozenset[str]())
    return text if "string" in allowed and not (kinds & allowed) else value


def _types(schema: object) -> set[str]:
    """The JSON types that a schema names; empty where it names none."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    types = {kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str)}
    for branches in (schema.get("anyOf"), schema.get("oneOf")):
        for branch in branches if isinstance(branches, list) else ():
            types |= _types(branch)
    return types


def _properties(tool: Tool) -> Mapping[str, object]:
    try:
        schema = msgspec.json.decode(tool.parameters) if bytes(tool.parameters) else None
    except (msgspec.DecodeError, RecursionError):
        return {}
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}
