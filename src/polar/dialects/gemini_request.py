"""Requests of Gemini, read into the pivot.

Only what is malformed is refused, or has no meaning without Google's servers. What no policy is given (Google's own tools,
media but images, most of the generation config) is left out and noted by name.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from polar.chat import ChatRequest, Message, RequestedSampling, Tool
from polar.dialects.bodies import Memory, decode_field, shortened, text_of
from polar.dialects.gemini_contents import Contents
from polar.dialects.gemini_reply import ALT_SSE
from polar.dialects.gemini_schema import checked, json_schema
from polar.dialects.gemini_wire import NULL, Several, each, read
from polar.errors import InvalidRequest

Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Limit = Annotated[int, Meta(ge=1, le=2**63 - 1)]
TopK = Annotated[float, Meta(ge=-(2**53), le=2**53)]

_NO_PARAMETERS = Raw(b'{"type":"object","properties":{}}')
_USED = {"contents", "systemInstruction", "tools", "toolConfig", "generationConfig"}
_OF_OTHER_PLACES = {"alt", "thinkingConfig"}  # what the reply depends on: from the query and the generation config only
_DECLARED = {"name", "description", "parameters", "parametersJsonSchema"}
_MODES = ("AUTO", "NONE", "ANY", "VALIDATED", "MODE_UNSPECIFIED")
_CHOICES = ("auto", "none", "required")  # what a tool of that name could not be told from
_MIME_TYPES = (None, "", "text/plain", "application/json")
_LONGEST_NAME = 80  # characters of a name that the harness chose and a note repeats
_NOTHING_ASKED: tuple[object, ...] = (False, 0, "", [], {}, ["TEXT"])


class _Body(Struct, rename="camel"):
    contents: Several = None
    system_instruction: str | dict[str, Raw] | None = None
    tools: Several = None
    tool_config: Raw = NULL
    generation_config: Raw = NULL
    safety_settings: Raw = NULL
    cached_content: str | None = None


class _CountBody(Struct, rename="camel"):
    generate_content_request: Raw = NULL


class _Tool(Struct, rename="camel"):
    function_declarations: Several = None


class _Declaration(Struct, rename="camel"):
    name: str
    description: str | None = None
    parameters: Raw = NULL
    parameters_json_schema: Raw = NULL


class _ToolConfig(Struct, rename="camel"):
    function_calling_config: Raw = NULL


class _Calling(Struct, rename="camel"):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


class _Generation(Struct, rename="camel"):
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    max_output_tokens: Limit | None = None
    stop_sequences: list[str] | None = None
    seed: Whole | None = None
    candidate_count: Whole | None = None
    response_mime_type: str | None = None
    response_schema: Raw = NULL
    response_json_schema: Raw = NULL
    thinking_config: Raw = NULL


_GENERATION = set(_Generation.__struct_encode_fields__)


class _Thinking(Struct, rename="camel"):
    include_thoughts: bool | None = None
    thinking_budget: Whole | None = None
    thinking_level: str | None = None


def read_request(model: str, verb: str, *, sse: bool, body: bytes, memory: Memory) -> ChatRequest:
    """The body of a request for `verb`; `sse` says in which of the two forms a stream is wanted.

    Raises:
        InvalidRequest: malformed, or it asks for what is refused by name.
    """
    fields, wire = _read_body(verb, body)
    if wire.cached_content:
        raise InvalidRequest(f"cachedContent: {shortened(wire.cached_content)} is not held here; send the contents themselves")
    reader = _Reader()
    generation, rest = reader.generation(wire.generation_config)
    messages = reader.messages(wire, memory)
    tools = reader.tools(wire.tools)
    choice = reader.tool_choice(wire.tool_config, tools)
    reader.note_if_asked("safetySettings", wire.safety_settings)
    streams = verb == "streamGenerateContent"
    kept = {name: raw for name, raw in fields.items() if name not in _USED | _OF_OTHER_PLACES}
    extra = {name: raw.copy() for name, raw in {**kept, **rest}.items()}
    return ChatRequest(
        model=model,
        messages=messages,
        tools=() if choice == "none" else tools,
        sampling=_sampling(generation),
        stream=streams,
        tool_choice=choice,
        json_schema=_reply_schema(generation),
        unserved=tuple(reader.unserved),
        extra={**extra, "alt": ALT_SSE} if streams and sse else extra,
    )


def _read_body(verb: str, body: bytes) -> tuple[dict[str, Raw], _Body]:
    """The request for a reply; `countTokens` may have it in a field of its own."""
    raw = Raw(text_of(body))
    if verb == "countTokens":
        counted = read("body", raw, _CountBody)[1].generate_content_request
        raw = raw if counted == NULL else counted
    return read("body", raw, _Body)


class _Reader:
    """Reads one request.

    Attributes:
        unserved: names of what the policy is not given, each once, in the order in which they were met.
    """

    def __init__(self) -> None:
        self.unserved: dict[str, None] = {}

    def note(self, name: str) -> None:
        self.unserved[name[:_LONGEST_NAME]] = None

    def note_if_asked(self, name: str, raw: Raw) -> None:
        if raw != NULL and decode_field(name, raw, object) not in _NOTHING_ASKED:
            self.note(name)

    def messages(self, wire: _Body, memory: Memory) -> tuple[Message, ...]:
        reader = Contents(self.note)
        if isinstance(wire.system_instruction, str):
            reader.system_text(wire.system_instruction)
        elif wire.system_instruction is not None:
            reader.system(Raw(msgspec.json.encode(wire.system_instruction)))
        contents = each("contents", wire.contents)
        if not contents:
            raise InvalidRequest("contents: expected at least one content")
        reader.read(contents, memory)
        return reader.done()

    def tools(self, several: Several) -> tuple[Tool, ...]:
        tools: list[Tool] = []
        for path, raw in each("tools", several):
            fields, wire = read(path, raw, _Tool)
            for name in fields:
                if name != "functionDeclarations":
                    self.note(f"tool:{name}")
            tools += [self._tool(*one) for one in each(f"{path}.functionDeclarations", wire.function_declarations)]
        return tuple(tools)

    def _tool(self, path: str, raw: Raw) -> Tool:
        fields, wire = read(path, raw, _Declaration)
        for name in fields:
            if name not in _DECLARED:
                self.note(f"functionDeclarations.{name}")
        schema = _NO_PARAMETERS
        if wire.parameters_json_schema != NULL:
            schema = checked(f"{path}.parametersJsonSchema", wire.parameters_json_schema)
        elif wire.parameters != NULL:
            schema = json_schema(f"{path}.parameters", wire.parameters)
        return Tool(wire.name, wire.description or "", schema)

    def tool_choice(self, raw: Raw, tools: tuple[Tool, ...]) -> str:
        if raw == NULL:
            return "auto"
        fields, config = read("toolConfig", raw, _ToolConfig)
        for name, value in fields.items():
            if name != "functionCallingConfig":
                self.note_if_asked(f"toolConfig.{name}", value)
        if config.function_calling_config == NULL:
            return "auto"
        path = "toolConfig.functionCallingConfig"
        calling = read(path, config.function_calling_config, _Calling)[1]
        mode = (calling.mode or "AUTO").upper()
        if mode not in _MODES:
            raise InvalidRequest(f"{path}.mode: expected one of {', '.join(_MODES)}, got {shortened(mode)}")
        if mode == "NONE":
            return "none"
        return self._choice(path, mode, calling.allowed_function_names or [], tools)

    def _choice(self, path: str, mode: str, allowed: list[str], tools: tuple[Tool, ...]) -> str:
        """ANY forces a call; VALIDATED lets the policy choose, and would have its calls fit their schemas."""
        names = {tool.name for tool in tools}
        if unknown := [name for name in allowed if name not in names]:
            raise InvalidRequest(f"{path}.allowedFunctionNames: {shortened(unknown[0])} is not one of the tools")
        if mode == "ANY" and not tools:
            self.note("tool_choice")  # of tools that the policy is not given
            return "auto"
        if mode == "ANY" and len(allowed) == 1 and allowed[0] not in _CHOICES:
            return allowed[0]
        if allowed:
            self.note("allowedFunctionNames")
        if mode == "VALIDATED":
            self.note("functionCallingConfig.mode")
        return "required" if mode == "ANY" else "auto"

    def generation(self, raw: Raw) -> tuple[_Generation, dict[str, Raw]]:
        """The generation config, and its fields that are not used."""
        if raw == NULL:
            return _Generation(), {}
        fields, wire = read("generationConfig", raw, _Generation)
        if (wire.candidate_count or 1) != 1:
            count = wire.candidate_count
            raise InvalidRequest(f"generationConfig.candidateCount: {count} is not served by this gateway; leave the field out")
        rest = {name: value for name, value in fields.items() if name not in _GENERATION}
        for name, value in rest.items():
            self.note_if_asked(name, value)
        rest.pop("alt", None)
        if wire.thinking_config != NULL:
            rest["thinkingConfig"] = self._thinking(wire.thinking_config)
        if wire.response_mime_type not in _MIME_TYPES:
            self.note("responseMimeType")
        return wire, rest

    def _thinking(self, raw: Raw) -> Raw:
        """How long to think is the policy's own; whether its thoughts are shown is not."""
        fields, wire = read("generationConfig.thinkingConfig", raw, _Thinking)
        if wire.thinking_budget not in (None, -1):
            self.note("thinkingBudget")
        if wire.thinking_level:
            self.note("thinkingLevel")
        return Raw(msgspec.json.encode(fields))


def _sampling(wire: _Generation) -> RequestedSampling:
    if any(not text for text in wire.stop_sequences or ()):
        raise InvalidRequest("generationConfig.stopSequences: expected texts that are not empty")
    top_k = wire.top_k
    if top_k is not None and not top_k.is_integer():
        raise InvalidRequest(f"generationConfig.topK: expected a whole number, got {top_k}")
    return RequestedSampling(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=None if top_k is None else int(top_k),
        max_tokens=wire.max_output_tokens,
        seed=wire.seed,
        stop=tuple(wire.stop_sequences or ()),
    )


def _reply_schema(wire: _Generation) -> Raw | None:
    """What the reply must fit; JSON without a schema is any JSON."""
    if wire.response_json_schema != NULL:
        return checked("generationConfig.responseJsonSchema", wire.response_json_schema)
    if wire.response_mime_type == "text/x.enum":
        return None
    if wire.response_schema != NULL:
        return json_schema("generationConfig.responseSchema", wire.response_schema)
    return Raw(b"{}") if wire.response_mime_type == "application/json" else None
