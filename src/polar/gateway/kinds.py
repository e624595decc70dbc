"""Which sort of call is this? (C06)

The rules of the harness's profile come first: headers and phrases that its makers chose. Where none holds, structure decides:
a call that goes on from another, leaves it, or begins as it did, is what that one was; of the others, one without tools beside an
agent that has some is auxiliary, and one with tools under another system prompt is a sub-agent.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from polar.chat import ChatRequest, Message
from polar.specs import CallKind, KindRule
from polar.tokens.history import Plan
from polar.tokens.lineage import system_text
from polar.tokens.records import Call

_TELLING = 16  # characters: a shorter line of a summary says nothing about where it went


@dataclass
class Threads:
    """What a session has seen of its agents.

    Attributes:
        system: hash of the system messages of the first agent call with tools.
        with_tools: an agent call had tools.
        starts: how agents' and sub-agents' histories begin, and the kind of each.
        summaries: (call, its telling line) of compactions, the newest last.
    """

    system: str = ""
    with_tools: bool = False
    starts: dict[str, CallKind] = field(default_factory=dict)
    summaries: list[tuple[str, str]] = field(default_factory=list)

    def note_asked(self, kind: CallKind, messages: Sequence[Message], *, has_tools: bool) -> None:
        """Remember a call of that kind."""
        if has_tools and kind == "agent":
            self.system = self.system or system_text(messages)
            self.with_tools = True
        if has_tools and kind in ("agent", "subagent"):
            self.starts.setdefault(_start(messages), kind)

    def note_answered(self, call: Call) -> None:
        """Remember what a compaction said."""
        if call.kind == "compaction" and call.choices:
            self.summaries.append((call.call_id, _telling(call.choices[0].message.text)))

    def origin(self, messages: Sequence[Message]) -> str:
        """The compaction whose summary stands in a history; "" for none."""
        for call_id, line in reversed(self.summaries):
            if line and any(line in message.text for message in messages):
                return call_id
        return ""


def call_kind(
    rules: Sequence[KindRule],
    request: ChatRequest,
    headers: Mapping[str, str],
    plan: Plan,
    calls: Mapping[str, Call],
    threads: Threads,
) -> CallKind:
    """The kind of a call whose prompt `plan` has found its place."""
    for rule in rules:
        if _holds(rule, request, headers):
            return rule.kind
    if before := _agent_before(plan.parent_call, calls):
        return before
    if known := threads.starts.get(_start(request.messages)):
        return known
    if not request.tools and threads.with_tools:
        return "auxiliary"
    if threads.system and request.tools and system_text(request.messages) != threads.system:
        return "subagent"
    return "agent"


def _agent_before(call_id: str, calls: Mapping[str, Call]) -> CallKind | None:
    """The agent or sub-agent in whose history a call is: side calls in between are passed over."""
    while (call := calls.get(call_id)) is not None:
        if call.kind in ("agent", "subagent"):
            return call.kind
        call_id = call.parent_call
    return None


def _start(messages: Sequence[Message]) -> str:
    """Hash of a history's system messages and the first message after them."""
    first = next((message.text for message in messages if message.role != "system"), "")
    return xxhash.xxh3_128_hexdigest(system_text(messages).encode() + first.encode("utf-8", "surrogatepass"))


def _holds(rule: KindRule, request: ChatRequest, headers: Mapping[str, str]) -> bool:
    if rule.header and not re.search(rule.header_value, headers.get(rule.header, "")):
        return False
    if rule.header and rule.header not in headers:
        return False
    if rule.tools != "any" and bool(request.tools) != (rule.tools == "some"):
        return False
    return _in_system(rule.system, request.messages) and _in_last(rule.last, request.messages)


def _in_system(pattern: str, messages: Sequence[Message]) -> bool:
    if not pattern:
        return True
    for message in messages:
        if message.role != "system":
            return False
        if re.search(pattern, message.text):
            return True
    return False


def _in_last(pattern: str, messages: Sequence[Message]) -> bool:
    if not pattern:
        return True
    return bool(messages) and messages[-1].role != "tool" and bool(re.search(pattern, messages[-1].text))


def _telling(text: str) -> str:
    """The longest line of a summary, by which it is found again; "" where all are short."""
    line = max((line.strip() for line in text.splitlines()), key=len, default="")
    return line if len(line) >= _TELLING else ""
