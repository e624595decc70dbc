"""Gemini's `Schema` as JSON schema.

It is OpenAPI 3.0's: types in capitals, `nullable` instead of a null type, 64-bit counts as text. JSON schema passes
unchanged, because clients put it there too.
"""

import json

from msgspec import Raw

from polar.dialects.bodies import decode_field
from polar.dialects.gemini_wire import camel
from polar.errors import InvalidRequest

_COUNTS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
_SCHEMAS = {"items", "additionalProperties"}
_LISTS_OF_SCHEMAS = {"anyOf", "allOf", "oneOf", "prefixItems"}
_MAPS_OF_SCHEMAS = {"properties", "$defs"}
_RENAMED = {"ref": "$ref", "defs": "$defs"}


def json_schema(path: str, raw: Raw) -> Raw:
    """The schema in `raw`, which `path` names, as JSON schema.

    Raises:
        InvalidRequest: not a JSON object, or nested too deeply.
    """
    schema = decode_field(path, raw, dict[str, object])
    try:
        return Raw(json.dumps(_object(schema), ensure_ascii=False, separators=(",", ":")).encode())
    except RecursionError:
        raise InvalidRequest(f"{path}: the schema is nested too deeply") from None


def checked(path: str, raw: Raw) -> Raw:
    """A JSON schema that is passed on byte for byte.

    Raises:
        InvalidRequest: not a JSON object.
    """
    decode_field(path, raw, dict[str, object])
    return raw.copy()


def _schema(value: object) -> object:
    return _object(value) if isinstance(value, dict) else value


def _object(schema: dict[str, object]) -> dict[str, object]:
    converted: dict[str, object] = {}
    for spelled, value in schema.items():
        name = camel(spelled)
        name = _RENAMED.get(name, name)
        if name == "example":
            converted["examples"] = [value]
        elif name not in ("nullable", "propertyOrdering") and (name, value) != ("type", "TYPE_UNSPECIFIED"):
            converted[name] = _value(name, value)
    if schema.get("nullable") is True:
        _allow_null(converted)
    return converted


def _value(name: str, value: object) -> object:
    if name == "type":
        return [_lower(kind) for kind in value] if isinstance(value, list) else _lower(value)
    if name in _SCHEMAS:
        return _schema(value)
    if name in _LISTS_OF_SCHEMAS and isinstance(value, list):
        return [_schema(item) for item in value]
    if name in _MAPS_OF_SCHEMAS and isinstance(value, dict):
        return {key: _schema(item) for key, item in value.items()}
    if name in _COUNTS and isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
        return int(value)
    return value


def _lower(kind: object) -> object:
    return kind.lower() if isinstance(kind, str) else kind


def _allow_null(schema: dict[str, object]) -> None:
    """Let the value be null as well."""
    kind, choices, values = schema.get("type"), schema.get("anyOf"), schema.get("enum")
    if isinstance(kind, str) and kind != "null":
        schema["type"] = [kind, "null"]
    if isinstance(choices, list):
        schema["anyOf"] = [*choices, {"type": "null"}]
    if isinstance(values, list) and None not in values:
        schema["enum"] = [*values, None]
