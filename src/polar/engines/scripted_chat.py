"""The scripted engine's chat mode: a chat template on the way in, and the Hermes tool parser of vLLM on the way out.

Both as careless as the real ones: a history is rendered as text and encoded anew, arguments are written as Python writes JSON,
and what touches a tool call may be lost. So what the engine shows of a later prompt differs from what was sampled.
"""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from polar.errors import UsageError

CALL, THINK, THINK_END = "<tool_call>", "<think>", "</think>"
_CALLS = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)

# For models whose own template knows no tools: ChatML, and the tools in Qwen's words.
CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
{{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


class Speech:
    """What a reply says, piece by piece: reasoning, text, and Hermes tool calls once they are closed.

    Attributes:
        called: a tool call was told.
    """

    def __init__(self, tools: bool) -> None:
        self.called = False
        self._tools = tools
        self._heard = ""
        self._told = ("", "", 0)

    def hear(self, text: str, *, over: bool) -> dict[str, object]:
        """The next piece of the reply's text; gives what is new in an OpenAI message or delta."""
        self._heard += text
        reasoning, content, calls = self._read(over)
        delta: dict[str, object] = {}
        old_reasoning, old_content, old_calls = self._told
        if len(reasoning) > len(old_reasoning):
            delta["reasoning"] = reasoning[len(old_reasoning) :]
        if len(content) > len(old_content):
            delta["content"] = content[len(old_content) :]
        if len(calls) > old_calls:
            delta["tool_calls"] = [_call(place, *call) for place, call in enumerate(calls)][old_calls:]
            self.called = True
        self._told = (reasoning, content, len(calls))
        return delta

    def _read(self, over: bool) -> tuple[str, str, list[tuple[str, str]]]:
        reasoning, text = "", self._heard
        if text.startswith(THINK):
            reasoning, closed, text = text.removeprefix(THINK).partition(THINK_END)
            if not closed:
                return _held(reasoning, THINK_END, over), "", []
        elif not over and THINK.startswith(text):
            return "", "", []
        if not self._tools:
            return reasoning, text, []
        content, opened, _ = text.partition(CALL)
        if not opened:
            return reasoning, _held(content, CALL, over), []
        calls = _parsed_calls(text, over)
        return reasoning, text if calls is None else content, calls or []


def _held(text: str, tag: str, over: bool) -> str:
    """`text` without an end that may be the start of `tag`."""
    if over:
        return text
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return text[:-size]
    return text


def _parsed_calls(text: str, over: bool) -> list[tuple[str, str]] | None:
    """The closed calls, at the end of a reply an open one too; None if one is no JSON, which makes all of it text."""
    calls = []
    for closed, opened in _CALLS.findall(text):
        if opened and not over:
            break
        try:
            call = json.loads(closed or opened)
            calls.append((call["name"], json.dumps(call["arguments"], ensure_ascii=False)))
        except (ValueError, KeyError, TypeError):
            return None if over else calls
    return calls


def _call(place: int, name: str, arguments: str) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {"index": place, "id": f"call_{place}", "type": "function", "function": function}


class _Config(Struct):
    chat_template: str | list[Any] | None = None


class ChatTemplate:
    """Renders messages as vLLM does: by the template of the model's directory if it knows tools, else as ChatML."""

    def __init__(self, model_dir: Path | None) -> None:
        source = _source(model_dir) if model_dir else ""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source if "tools" in source else CHATML)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """The prompt, open for the assistant's next words.

        Raises:
            UsageError: the template refuses the messages, or they hold what is no text.
        """
        try:
            prepared = [_prepared(message) for message in messages]
            return self._template.render(messages=prepared, tools=tools or None, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise UsageError(f"the chat template cannot render this: {error}") from error


def _source(model_dir: Path) -> str:
    try:
        return (model_dir / "chat_template.jinja").read_text()
    except FileNotFoundError:
        pass
    config = model_dir / "tokenizer_config.json"
    template = msgspec.json.decode(config.read_bytes(), type=_Config).chat_template if config.exists() else None
    return template if isinstance(template, str) else ""


def _prepared(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM hands it to templates: one text, arguments as objects, reasoning under both names."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part["text"] for part in content)
    prepared = {**message, "content": content}
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        prepared |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls := message.get("tool_calls"):
        prepared["tool_calls"] = [{**call, "function": _with_object(call["function"])} for call in calls]
    return prepared


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError:
        arguments = {}  # as vLLM does, lest the conversation be lost
    return {**function, "arguments": arguments if isinstance(arguments, dict) else {}}


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
