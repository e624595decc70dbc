"""Random sessions: harnesses that continue, re-sample, rewrite, compact and run side by side; what they ask is captured as the
gateway captures it, and told a second time in plain lists for an oracle.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from hypothesis import strategies as st
from msgspec import Raw, structs

from polar.chat import FinishReason, Message, RequestedSampling, TextPart, Tool, ToolCall
from polar.ids import parse_minted, tool_call_id
from polar.specs import CallKind, VersionSpan
from polar.tokens.history import History, Plan, prompt_hash
from polar.tokens.records import Call, CallStatus, ChoiceRecord
from polar.trajectory.builders import Captured
from tests.tokens.toy import END, OTHER, ToyRenderer, body, left

TOOLS = ((), (Tool("bash", "Run it.", Raw(b"{}")),), (Tool("bash", "Run it.", Raw(b"{ }")),))
ARGUMENTS = ('{"a": 1}', '{"a":1.0}', '{"a":2}', '{"b":2,"a":"é"}', '{"a": "\\u00e9", "b": 2}', '{"a":0,"a":2}', "no json", "")
RESPELLED = {
    '{"a": 1}': '{"a":1.0}',
    '{"a":1.0}': '{"a": 1}',
    '{"b":2,"a":"é"}': '{"a": "\\u00e9", "b": 2}',
    '{"a":0,"a":2}': '{"a":2}',
}


def text_message(role: str, text: str) -> Message:
    return msgspec.convert({"role": role, "content": [{"type": "text", "text": text}] if text else []}, Message)


def meaning(message: Message) -> object:
    """What a message says, in values that Python compares; nothing here hashes or canonicalises text."""
    calls = [(call.name, _value(call.arguments)) for call in message.tool_calls]
    return [message.role, "".join(part.text for part in message.content), calls]


def _value(arguments: str) -> object:
    try:
        return ["json", _typed(json.loads(arguments))]
    except ValueError:
        return ["text", arguments]


def _typed(value: object) -> object:
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return [isinstance(value, bool), value]


@dataclass
class Answer:
    """One call as the oracle knows it: lists of ids and values, no hashes and no tree."""

    call_id: str
    said: list[object]
    tools: list[bytes]
    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]
    trusted: bool
    versions: list[int]


@dataclass
class Conversation:
    """A history as a harness holds it."""

    messages: list[Message]
    tools: tuple[Tool, ...] = ()
    kind: CallKind = "agent"


@dataclass
class Session:
    """A session under test beside its oracle."""

    history: History = field(default_factory=lambda: History(ToyRenderer()))
    calls: list[Call] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    messages: dict[str, Message] = field(default_factory=dict)
    tools: dict[str, tuple[Tool, ...]] = field(default_factory=dict)

    def ask(
        self,
        conversation: Conversation,
        reply: Message,
        *,
        other: bool = False,
        finish: FinishReason = "stop",
        status: CallStatus = "ok",
        versions: Sequence[int] = (1,),
        replaces: str = "",
    ) -> Call:
        """One call from request to record, by the steps that the gateway takes.

        Args:
            other: the reply is sampled in ids that no rendering gives.
            versions: policy versions of the reply's tokens; the last goes on to the end.
        """
        call_id = f"c{len(self.calls)}{'abcdefgh'}"
        messages = tuple(conversation.messages)
        plan = self.history.plan(messages, conversation.tools)
        prompt = self.history.place(plan, self.history.render(plan), call_id)
        prompt_ids = self.history.tree.path(prompt)
        ids = [token + OTHER * other for token in body(reply)] + ([END] if finish != "length" else [])
        ids = ids or [END]
        logprobs = [-(len(self.calls) + place / 64) for place in range(len(ids))]
        calls = tuple(ToolCall(tool_call_id(call_id, 0, n), call.name, call.arguments) for n, call in enumerate(reply.tool_calls))
        reply = structs.replace(reply, tool_calls=calls)
        node = None
        if status != "failed":
            values = np.asarray(logprobs, np.float32)
            node = self.history.tree.add_sampled(
                prompt, np.asarray(ids, np.int32), values, spans(versions, len(ids)), call_id, 0
            ).node_id
        hashes = tuple(msgspec.json.encode(message).decode() for message in messages)
        self.messages.update(zip(hashes, messages, strict=True))
        self.tools[plan.tools_hash] = conversation.tools
        record = Call(
            call_id=call_id,
            session_id="s1",
            ordinal=len(self.calls),
            dialect="toy",
            model="policy",
            engine="toy",
            kind=conversation.kind,
            status=status,
            prompt=prompt,
            prompt_tokens=len(prompt_ids),
            prompt_hash=prompt_hash(prompt_ids),
            request_hash="",
            message_hashes=hashes,
            tools_hash=plan.tools_hash,
            choices=(ChoiceRecord(node, finish if status == "ok" else "abort", reply),) if node is not None else (),
            logprobs_mode="raw",
            chain=plan.chain,
            requested=RequestedSampling(),
            resolved={"temperature": 0.7, "top_p": 0.9, "top_k": 20.0, "max_tokens": 100.0 - len(self.calls)},
            sampled=len(ids),
            parent_call=plan.parent_call,
            fork_reason=plan.continuation.fork_reason,
            replaces=replaces,
            delivered=status == "ok",
        )
        if status == "ok":
            self.history.answered(record, plan.system)
        said = [meaning(message) for message in (*messages, reply)]
        written = [msgspec.json.encode(tool) for tool in conversation.tools]
        self.answers.append(
            Answer(call_id, said, written, prompt_ids.tolist(), ids, logprobs, status == "ok", each(versions, len(ids)))
        )
        self.calls.append(record)
        self.plans.append(plan)
        return record

    def captured(self) -> Captured:
        return Captured(self.calls, self.history.tree.nodes, self.messages, self.tools)

    def expected_prompt(self, conversation: Conversation, answers: Sequence[Answer]) -> tuple[list[int], str]:
        """The prompt that must be sent given earlier `answers`, and the call that it continues."""
        messages = conversation.messages
        last = max((place for place, message in enumerate(messages) if message.role == "assistant"), default=-1)
        said = [meaning(message) for message in messages[: last + 1]]
        written = [msgspec.json.encode(tool) for tool in conversation.tools]
        names = {parsed[0] for call in messages[last].tool_calls if (parsed := parse_minted(call.id))} if last >= 0 else set()
        meant = [
            answer
            for answer in answers
            if answer.trusted and answer.said == said and answer.tools == written and (len(names) != 1 or answer.call_id in names)
        ]
        renderer = ToyRenderer()
        if last < 0 or len(meant) != 1:
            return renderer.render(messages, conversation.tools).tolist(), ""
        (parent,) = meant
        stored = parent.prompt + parent.sampled
        return stored + renderer.bridge(left(stored[-1] == END), messages[last + 1 :]).tolist(), parent.call_id


def each(versions: Sequence[int], length: int) -> list[int]:
    """One version for each token: the last goes on to the end."""
    return [*versions, *[versions[-1]] * length][:length]


def spans(versions: Sequence[int], length: int) -> tuple[VersionSpan, ...]:
    """Spans of one token each: neighbours of one version are for the builder to join."""
    return tuple(VersionSpan(place, place + 1, version) for place, version in enumerate(each(versions, length)))


replies = st.just(Message("assistant", (TextPart("a"),))) | st.builds(
    lambda text, calls: Message(
        "assistant", (TextPart(text),) if text else (), "", tuple(ToolCall("", "bash", arguments) for arguments in calls)
    ),
    st.sampled_from(["", "a", "b", "日本"]),
    st.lists(st.sampled_from(ARGUMENTS), max_size=2),
)


def respell(message: Message) -> Message:
    calls = tuple(structs.replace(call, arguments=RESPELLED.get(call.arguments, call.arguments)) for call in message.tool_calls)
    return structs.replace(message, tool_calls=calls, reasoning="never said", content=(*message.content, TextPart("")))


def rename(message: Message, call_id: str) -> Message:
    """The message with ids that name another call."""
    calls = tuple(structs.replace(call, id=tool_call_id(call_id, 0, n)) for n, call in enumerate(message.tool_calls))
    return structs.replace(message, tool_calls=calls)


def rewrite(message: Message) -> Message:
    return structs.replace(message, content=(TextPart(message.text + "!"),))


def last_reply(messages: Sequence[Message]) -> int:
    return max((place for place, message in enumerate(messages) if message.role == "assistant"), default=-1)


CHANGES = (
    "nothing nothing nothing nothing resample resample resample drop_turn rewrite respell rename foreign rename_and_rewrite "
    "tools system compact branch inject"
).split()


def change(data: st.DataObject, session: Session, conversations: list[Conversation], conversation: Conversation) -> Conversation:
    """Do to a history what harnesses do; the conversation that asks next."""
    kind, messages = data.draw(st.sampled_from(CHANGES)), conversation.messages
    last = last_reply(messages)
    any_call = f"c{data.draw(st.integers(0, max(0, len(session.calls) - 1)))}abcdefgh"
    edits: dict[str, Callable[[Message], Message]] = {
        "rewrite": rewrite,
        "respell": respell,
        "rename": lambda message: rename(message, any_call),
        "foreign": lambda message: rename(message, "c99zzzzzzzz"),
        "rename_and_rewrite": lambda message: rewrite(rename(message, any_call)),
    }
    if kind in edits and last >= 0:
        messages[last] = edits[kind](messages[last])
    elif kind in ("resample", "drop_turn") and last >= 0:
        del messages[last:]
        messages += [text_message("user", "again")] if kind == "drop_turn" else []
    elif kind == "tools":
        conversation.tools = data.draw(st.sampled_from(TOOLS))
    elif kind == "system":
        messages[0] = text_message("system", data.draw(st.sampled_from(["brief", "long"])))
    elif kind == "compact":
        messages[1:] = [text_message("user", "summary")]
    elif kind == "inject":
        messages += [text_message("assistant", "a"), text_message("user", "u")]
    elif kind == "branch":
        conversation = Conversation(list(messages), conversation.tools, data.draw(st.sampled_from(["agent", "subagent"])))
        conversations.append(conversation)
    return conversation


def follow(conversation: Conversation, call: Call) -> None:
    """The reply joins the history, and so do its results or a word of the user."""
    if call.status == "ok":
        reply = call.choices[0].message
        results = [structs.replace(text_message("tool", "r"), tool_call_id=made.id) for made in reply.tool_calls]
        conversation.messages += [reply, *(results or [text_message("user", "u")])]


def new_conversations() -> list[Conversation]:
    start = [text_message("system", "brief"), text_message("user", "u")]
    return [Conversation(list(start)), Conversation(list(start), TOOLS[1], "subagent")]


def steps(data: st.DataObject, session: Session, most: int = 10) -> Iterable[tuple[Conversation, Call]]:
    """Run a random session; after each call the conversation as it was asked, and the record."""
    conversations = new_conversations()
    for _ in range(data.draw(st.integers(1, most))):
        asking = change(data, session, conversations, data.draw(st.sampled_from(conversations)))
        asked = Conversation(list(asking.messages), asking.tools, asking.kind)
        status: CallStatus = data.draw(st.sampled_from(["ok", "ok", "ok", "ok", "aborted", "failed"]))
        aborted = [call.call_id for call in session.calls if call.status == "aborted"]
        call = session.ask(
            asking,
            data.draw(replies),
            other=data.draw(st.booleans()),
            finish=data.draw(st.sampled_from(["stop", "stop", "length"])),
            status=status,
            versions=data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)),
            replaces=data.draw(st.sampled_from(["", "", *aborted[-1:]])),
        )
        follow(asking, call)
        yield asked, call
