"""A renderer over the model's own chat template, for models whose family nobody has written down.

What follows a reply is cut out of a rendering of a probe history: everything behind the id that ends the probe's reply. That
is right only for templates whose later turns do not depend on earlier ones; `tokens.stability` finds out.
"""

import json
import secrets
from collections.abc import Callable, Sequence

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from polar.chat import Message, Tool
from polar.errors import BridgeRefused, InvalidRequest, UsageError
from polar.specs import Int32Array
from polar.tokens import wire
from polar.tokens.guard import Guard, Spellings
from polar.tokens.hermes import TAGS, HermesParser
from polar.tokens.rendering import LastTurn, ReplyParser
from polar.tokens.tokenizer import Tokenizer
from polar.tokens.wire import Json

ASK: Json = {"role": "user", "content": "?"}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, by which templates mark an assistant's words for trainers: it writes what it holds."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A chat template as Hugging Face writes them: Jinja, in a sandbox."""

    def __init__(self, source: str, names: dict[str, object], now: Callable[[str], str]) -> None:
        """Take the template, what it may refer to besides messages (`bos_token`), and a clock's `strftime`.

        Raises:
            UsageError: it is no Jinja template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation], autoescape=False
        )
        environment.filters["tojson"] = _tojson
        environment.globals["strftime_now"] = now
        environment.globals["raise_exception"] = _refuse
        self._names = names
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as fault:  # too many loops or brackets within each other
            raise UsageError(f"the model's chat template is no Jinja template: {fault}") from fault

    def render(self, messages: Sequence[Json], tools: Sequence[Json] = (), *, opens: bool = True, **names: object) -> str:
        """The text of a history; with `opens`, up to the assistant's next words.

        Raises:
            InvalidRequest: the template refuses it.
        """
        try:
            text: str = self._template.render(
                **self._names, **names, messages=list(messages), tools=list(tools) or None, add_generation_prompt=opens
            )
        except Exception as fault:  # a template is a program of the model's makers, and fails in its own ways
            raise InvalidRequest(f"the model's chat template cannot show this history: {fault}") from fault
        return text


class TemplateRenderer:
    """Renders by a chat template; see `Renderer`. Calls of tools are read and written in the Hermes format, or not at all.

    Attributes:
        shows_tools: the template writes tools, and their calls in the Hermes format.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, identity: str = "") -> None:
        """Take the model's tokenizer and template; `identity` becomes part of `name`.

        Raises:
            UsageError: a reply's end cannot be told from the template.
        """
        self.name = f"template-{identity}" if identity else "template"
        self._tokenizer = tokenizer
        self._template = template
        self._spellings = Spellings([*tokenizer.spellings, *TAGS])
        self._stop = self._end_of_turn()
        stop = tokenizer.token_id(self._stop)
        assert stop is not None
        self.stop_ids = tuple(dict.fromkeys(id for id in (stop, tokenizer.eos_id) if id is not None))
        self._raw_arguments = not _takes(template, [ASK, _calling({"flag": True})])
        self.shows_tools = _writes_hermes(template)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        """A whole history, ending where the assistant's next words begin; int32[n].

        Raises:
            InvalidRequest: the template refuses it, or shows no tools in a known format.
        """
        if tools and not self.shows_tools:
            raise InvalidRequest(
                "the model's chat template shows no tools in a format that Polar reads; serve the model in chat mode "
                "(the engine renders), or without tools"
            )
        return self.as_written(messages, tools)

    def as_written(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        """What the template makes of a history, whatever its format of tools; int32[n]."""
        guard = Guard(self._spellings, wire.texts(messages, tools))
        specs = [wire.spec(tool, guard) for tool in tools]
        return guard.encode(self._tokenizer, self._template.render(self._turns(messages, guard), specs))

    def bridge(self, last: LastTurn, messages: Sequence[Message]) -> Int32Array:
        """What follows sampled ids up to the next turn's opening; int32[n].

        Raises:
            BridgeRefused: the template does not show where the reply ends.
            ValueError: `messages` holds an assistant message; its ids are sampled, never rendered here.
        """
        if any(message.role == "assistant" for message in messages):
            raise ValueError("a bridge holds what came after the reply, never an assistant message")
        guard = Guard(self._spellings, wire.texts(messages))
        mark = guard.sentinel[::-1]  # a word that nobody can know either
        reply: Json = {"role": "assistant", "content": mark}
        if last.calls:
            reply["tool_calls"] = [wire.call(call, guard, raw_arguments=self._raw_arguments) for call in last.calls]
        text = self._template.render([ASK, reply, *self._turns(messages, guard)])
        end = text.find(self._stop, text.find(mark))
        if text.count(mark) != 1 or end < 0:
            raise BridgeRefused("the chat template does not show where the reply ends")
        return guard.encode(self._tokenizer, text[end + len(self._stop) if last.stopped else end :])

    def parser(self, tools: Sequence[Tool] = ()) -> ReplyParser:
        """A fresh parser for one generation."""
        return HermesParser(self._tokenizer, self.stop_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens spelled out."""
        return self._tokenizer.decode(ids)

    def _turns(self, messages: Sequence[Message], guard: Guard) -> list[Json]:
        return [wire.turn(message, guard, raw_arguments=self._raw_arguments) for message in messages]

    def _end_of_turn(self) -> str:
        """The control token that the template writes behind a reply (T07)."""
        mark = "q" + secrets.token_hex(8)
        try:
            behind = self._template.render([ASK, {"role": "assistant", "content": mark}], opens=False).partition(mark)[2]
        except InvalidRequest as fault:
            raise UsageError(str(fault)) from fault
        for part in self._tokenizer.split_scaffold(behind):
            if isinstance(part, int):
                return self._tokenizer.decode([part])
            if part.strip():
                break
        raise UsageError("the model's chat template ends a reply with no control token; serve the model in chat mode")


def _calling(arguments: object) -> Json:
    call = {"type": "function", "id": "1", "function": {"name": "probe", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _takes(template: ChatTemplate, history: Sequence[Json]) -> bool:
    try:
        template.render(history)
    except InvalidRequest:
        return False
    return True


def _writes_hermes(template: ChatTemplate) -> bool:
    tool: Json = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "properties": {}}}}
    try:
        text = template.render([ASK, _calling({"flag": True})], [tool])
    except InvalidRequest:
        return False
    return '<tool_call>\n{"name": "probe", "arguments": {"flag": true}}\n</tool_call>' in text and text.count('"probe"') > 1


def _tojson(value: object, **layout: object) -> str:
    """As transformers has it: letters stay what they are, and keys keep their order."""
    layout.setdefault("ensure_ascii", False)
    return json.dumps(value, **layout)  # type: ignore[arg-type]  # what a template gives is json's to judge


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
