"""Messages and tools in the shape in which chat templates and the library `renderers` take them, guarded (T12)."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from polar.chat import Message, Tool, ToolCall
from polar.tokens.guard import Guard
from polar.tokens.hermes import is_json_object, tool_spec, writing

Json = dict[str, object]


def texts(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Iterator[str]:
    """All that comes from outside in a call."""
    for message in messages:
        yield from (message.text, message.reasoning)
        yield from (part for call in message.tool_calls for part in (call.name, call.arguments))
    for tool in tools:
        yield from (tool.name, tool.description, bytes(tool.parameters).decode(errors="replace"))


def turn(message: Message, guard: Guard, ids: Mapping[str, str] = {}, *, raw_arguments: bool = False) -> Json:
    """One message. `ids`: what the model sees instead of a call's id; `raw_arguments`: they are passed on as text."""
    said: Json = {"role": message.role, "content": guard.text(message.text)}
    if message.reasoning:
        said["reasoning_content"] = guard.text(message.reasoning)
    if message.tool_calls:
        said["tool_calls"] = [call(each, guard, ids, raw_arguments=raw_arguments) for each in message.tool_calls]
    if message.role == "tool":
        said["tool_call_id"] = guard.text(ids.get(message.tool_call_id, message.tool_call_id))
    return said


def call(each: ToolCall, guard: Guard, ids: Mapping[str, str] = {}, *, raw_arguments: bool = False) -> Json:
    """One call of a tool; its arguments as an object, or as the text that they are."""
    arguments: object = guard.text(each.arguments)
    if not raw_arguments:  # some renderers decode a text that is JSON, which would bring back what its escapes spell
        is_object = is_json_object(each.arguments)
        arguments = guard.value(msgspec.json.decode(each.arguments)) if is_object else f"{guard.sentinel}{arguments}"
    function = {"name": guard.text(each.name), "arguments": arguments}
    return {"type": "function", "id": guard.text(ids.get(each.id, each.id)), "function": function}


def spec(tool: Tool, guard: Guard) -> Json:
    """One tool.

    Raises:
        InvalidRequest: its schema cannot be written.
    """
    written = tool_spec(tool)
    with writing(tool):
        guarded = guard.value(written)
    assert isinstance(guarded, dict)
    return guarded
