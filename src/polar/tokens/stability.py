"""Whether a conversation that grows by bridges is what the model's template would have written (T04).

Two claims are proven on probe dialogues. What follows a reply is to the id what stands behind it in the whole rendering, and
between lies the reply, which is read as it was said: without this no renderer may be used. And a whole rendering begins with
the prompts that came before it: many templates break this on purpose, by leaving out earlier reasoning. Then a conversation
that goes on keeps what was sampled, and only one that forks sees what the template makes of its past.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import Raw, Struct

from polar.chat import Message, Role, TextPart, Tool, ToolCall
from polar.errors import BridgeRefused, RequestError
from polar.specs import Int32Array
from polar.tokens.lineage import meaning
from polar.tokens.rendering import LastTurn, Renderer
from polar.tokens.tree import common_prefix


class Break(Struct, frozen=True):
    """Where a claim does not hold: which probe dialogue, behind which of its messages, and how.

    Attributes:
        fatal: the renderer must not be used.
    """

    dialogue: str
    message: int
    why: str
    fatal: bool


class Dialogue(Struct, frozen=True):
    name: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


def _say(role: Role, text: str, answers: str = "") -> Message:
    return Message(role, (TextPart(text),), tool_call_id=answers)


def _reply(text: str, *calls: ToolCall, reasoning: str = "") -> Message:
    return Message("assistant", (TextPart(text),), reasoning, calls)


_SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "all": {"type": "boolean"},
        "count": {"type": "integer"},
        "more": {"type": "array", "items": {"type": "string"}},
    },
}
_TOOLS = (
    Tool("look", "Look at a file.", Raw(msgspec.json.encode(_SCHEMA))),
    Tool("wait", "Wait.", Raw(b'{"type":"object","properties":{}}')),
)
_LOOK = ToolCall("call_1", "look", '{"path": "a b/é.txt", "all": true, "count": 3, "more": ["x", "y"]}')
_WAIT = ToolCall("call_2", "wait", "{}")
_AGAIN = ToolCall("call_3", "wait", "{}")

PLAIN = Dialogue(
    "questions and answers",
    (
        _say("system", "Be brief."),
        _say("user", "Hi"),
        _reply("Hello.\n\n  Two  spaces, é."),
        _say("user", "And  now?\n"),
        _reply("Bye"),
        _say("user", "?"),
    ),
)
WITH_TOOLS = Dialogue(
    "one question with tools",
    (
        _say("system", "Be brief."),
        _say("user", "What is in the file?"),
        _reply("I look.", _LOOK, reasoning="A file: look."),
        _say("tool", "  two\n\n{}", "call_1"),
        _reply("", _WAIT, reasoning="Wait a little."),
        _say("tool", "", "call_2"),
    ),
    _TOOLS,
)
LONG = Dialogue(
    "several questions with tools and reasoning",
    (
        *WITH_TOOLS.messages,
        _reply("Nothing.", reasoning="It was empty."),
        _say("user", "And now?"),
        _reply("", _AGAIN, reasoning="Again."),
        _say("tool", "done", "call_3"),
        _say("user", "Stop."),
    ),
    _TOOLS,
)


def breaks(renderer: Renderer) -> tuple[Break, ...]:
    """All breaks on the probe dialogues; for a renderer that shows no tools, on those that need none."""
    found: list[Break] = []
    for dialogue in (PLAIN, WITH_TOOLS, LONG) if renderer.shows_tools else (PLAIN,):
        for place, message in enumerate(dialogue.messages):
            if message.role == "assistant" and (broken := _behind(renderer, dialogue, place)):
                found.append(Break(dialogue.name, place, *broken))
    return tuple(found)


def _behind(renderer: Renderer, dialogue: Dialogue, place: int) -> tuple[str, bool] | None:
    """What is wrong with one reply and what follows it, and whether that is fatal."""
    said, tools = dialogue.messages, dialogue.tools
    after = next((at for at in range(place + 1, len(said)) if said[at].role == "assistant"), len(said))
    try:
        prompt, whole = renderer.render(said[:place], tools), renderer.render(said[:after], tools)
        words = _words(renderer, prompt, renderer.render(said[: place + 1], tools))
        for stop in renderer.stop_ids:
            last = LastTurn(np.asarray([*words, stop], np.int32), True, said[place].tool_calls)
            tail = renderer.bridge(last, said[place + 1 : after])
            end = len(whole) - len(tail)
            if np.array_equal(whole[end:], tail) and whole[end - 1] == stop:
                return _reply_between(renderer, prompt, whole[:end], said[place], tools)
    except (BridgeRefused, RequestError) as fault:
        return str(fault), True
    return "a bridge is not what the whole rendering has behind the reply", True


def _words(renderer: Renderer, prompt: Int32Array, closed: Int32Array) -> list[int]:
    """A reply's ids up to its end, from a rendering that ends with it; none where that shows no end."""
    own: list[int] = closed[common_prefix(prompt, closed) :].tolist()
    return next((own[:at] for at, id in enumerate(own) if id in renderer.stop_ids), [])


def _reply_between(
    renderer: Renderer, prompt: Int32Array, closed: Int32Array, said: Message, tools: Sequence[Tool]
) -> tuple[str, bool] | None:
    """What is wrong with the reply that ends `closed`: it does not follow the prompt, or is not read as it was said."""
    if (same := common_prefix(prompt, closed)) < len(prompt):
        return f"a whole rendering leaves the earlier prompt at id {same} of {len(prompt)}", False
    parser = renderer.parser(tools)
    parser.push(closed[len(prompt) :].tolist())
    read = parser.finish()[1]
    calls = tuple((name, meaning(arguments)) for name, arguments in read.tool_calls)
    if calls != tuple((call.name, meaning(call.arguments)) for call in said.tool_calls):
        return f"its calls are read as {read.tool_calls}", True
    if (read.text or said.text).strip() != said.text.strip() or (read.reasoning or said.reasoning) != said.reasoning:
        return f"it is read as {read.text!r}, with the reasoning {read.reasoning!r}", True
    if said.text and not read.text:
        return "a whole rendering leaves out its text", False
    return None
