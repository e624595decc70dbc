"""The token side of one session: tree, lineage and renderer together turn a request's messages into prompt ids.

A prompt that continues a known reply is that reply's stored path plus the rendered new messages, so it starts with what
the policy saw and said, to the token. Every other prompt is rendered whole, and shares with the tree what happens to agree.

In chat mode the engine renders, always whole, and its ids are put in their place afterwards: behind the reply that they
continue if they begin with all that is stored up to there, else from the root, and that is a drift. So are the prompts of a
session whose reasoning is to stay as the harness sends it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from polar.chat import Message, Tool, ToolCall
from polar.specs import Int32Array
from polar.tokens.lineage import (
    Continuation,
    Lineage,
    Reply,
    Root,
    chain_values,
    extend,
    fingerprint,
    shared,
    system_text,
    tools_root,
)
from polar.tokens.records import Call, Node, Position
from polar.tokens.rendering import LastTurn, Renderer
from polar.tokens.tree import EMPTY, TokenTree, common_prefix


@dataclass(frozen=True)
class Plan:
    """How a prompt will be made.

    Attributes:
        tools_hash: fingerprint of the tools, root of the chain.
        chain: fingerprint of tools and all messages.
        system: hash of the system messages that the history starts with.
        start: where in the tree the new ids begin.
        stopped: the reply at `start` ends with a stop id (meaningless at the root).
        new: messages to render.
        calls: those of the reply at `start`, under the ids by which `new` answers them.
    """

    continuation: Continuation
    tools_hash: str
    chain: str
    system: str
    start: Position
    stopped: bool
    tools: tuple[Tool, ...]
    new: tuple[Message, ...]
    calls: tuple[ToolCall, ...] = ()

    @property
    def parent_call(self) -> str:
        """The call whose reply is continued, or for a fork the one that was left."""
        return self.continuation.reply.call_id if self.continuation.reply else self.continuation.left

    @property
    def size(self) -> int:
        """Characters to encode, to decide whether that is done off the event loop."""
        texts = sum(len(part.text) for message in self.new for part in message.content)
        texts += sum(len(message.reasoning) for message in self.new)
        texts += sum(len(call.arguments) for message in self.new for call in message.tool_calls)
        tools = () if self.continuation.reply else self.tools
        return texts + sum(len(tool.description) + len(bytes(tool.parameters)) for tool in tools)


@dataclass(frozen=True)
class Told:
    """A whole reply on a path: tokens `start` to `end` of it."""

    start: int
    end: int
    reply: Reply


class History:
    """Tree and lineage of one session. Owned by one event loop.

    Args:
        renderer: None in chat mode.
        trim: see `lineage.link`.
        as_sent: prompts are rendered whole, by the template's own rules (`rendering.render_as_sent`).
    """

    def __init__(
        self, renderer: Renderer | None, nodes: Iterable[Node] = (), *, trim: bool = False, as_sent: bool = False
    ) -> None:
        self.renderer = renderer
        self.as_sent = as_sent
        self.tree = TokenTree(nodes)
        self._saved = len(self.tree.nodes)
        self._trim = trim
        self._lineage = Lineage(trim=trim)
        self._known: dict[str, bytes] = {}  # address → fingerprint
        self._last: tuple[tuple[str, ...], list[str]] = (), [""]  # addresses of the last history, and its chain's values
        self._ends: dict[Reply, Position] = {}
        self._untraced: set[Reply] = set()  # replies whose ids nobody has

    def plan(
        self, messages: Sequence[Message], tools: Sequence[Tool], addresses: tuple[str, ...] = (), *, traced: bool = True
    ) -> Plan:
        """Decide what a prompt continues. Cheap; renders nothing.

        Args:
            addresses: those of the messages, then that of the tools, where they are known: what came before is not read again.
            traced: the prompt will stand in the tree; else only what it continues is of interest.
        """
        root = addresses[-1] if addresses else tools_root(tools)
        values = self._values(root, messages, addresses)
        continuation = self._lineage.find(values, messages)
        if not self.tree.nodes and not self._untraced:
            continuation = Continuation(None)  # before anybody was asked, replies are the harness's own: examples, no history
        if traced and continuation.reply in self._untraced:
            continuation = Continuation(None, 0, "external_history", continuation.reply.call_id)
        start, stopped, new = EMPTY, True, tuple(messages)
        calls: tuple[ToolCall, ...] = ()
        if continuation.reply in self._ends:
            start, new = self._ends[continuation.reply], new[continuation.known :]
            calls = messages[continuation.known - 1].tool_calls
            stopped = self.renderer is not None and int(self.tree.nodes[start.node].ids[-1]) in self.renderer.stop_ids
        return Plan(continuation, root, values[-1], system_text(messages), start, stopped, tuple(tools), new, calls)

    def _values(self, root: str, messages: Sequence[Message], addresses: tuple[str, ...]) -> list[str]:
        """The chain's values: those of the last history as far as this one is the same."""
        if not addresses:
            return chain_values(root, messages, trim=self._trim)
        last, known = self._last
        same = shared(last, addresses[:-1]) if known[0] == root else 0
        values = known[: same + 1] if same else [root]
        extend(values, map(self._fingerprint, messages[same:], addresses[same:-1]))
        self._last = addresses[:-1], values
        return values

    def _fingerprint(self, message: Message, address: str) -> bytes:
        if (known := self._known.get(address)) is None:
            known = self._known[address] = fingerprint(message, trim=self._trim)
        return known

    def render(self, plan: Plan) -> Int32Array:
        """The ids that follow `plan.start`, where there is a renderer; pure, may run in any thread.

        Raises:
            BridgeRefused: the renderer cannot go on from the reply; `whole` is the plan without it.
        """
        assert self.renderer is not None
        if plan.continuation.reply is None:
            return self.renderer.render(plan.new, plan.tools)
        return self.renderer.bridge(LastTurn(self.tree.nodes[plan.start.node].ids, plan.stopped, plan.calls), plan.new)

    def whole(self, plan: Plan, messages: Sequence[Message]) -> Plan:
        """The plan of a prompt that `render` refused to go on with: the same history, rendered whole."""
        continuation = Continuation(None, 0, "bridge_refused", plan.parent_call)
        return replace(plan, continuation=continuation, start=EMPTY, stopped=True, new=tuple(messages), calls=())

    def place(self, plan: Plan, ids: Int32Array, call_id: str) -> Position:
        """Put rendered ids into the tree; where the prompt ends."""
        return self.tree.add_context(plan.start, ids, call_id)

    def place_whole(self, plan: Plan, ids: Int32Array, call_id: str) -> tuple[Position, int | None]:
        """Put a prompt into the tree that was rendered whole although it may continue a reply.

        Returns:
            Where it ends; and the first token in which it differs from what it should begin with, None if it does not.
        """
        reached = 0
        for node, stop in self.tree.spans(plan.start):
            same = common_prefix(node.ids[:stop], ids[reached:])
            reached += same
            if same < stop:
                return self.tree.add_context(EMPTY, ids, call_id), reached
        return self.tree.add_context(plan.start, ids[reached:], call_id), None

    def told(self, at: Position) -> list[Told]:
        """The whole replies on the path to `at`, in order."""
        replies: list[Told] = []
        reached = 0
        for node, stop in self.tree.spans(at):
            if node.kind == "sampled" and stop == len(node.ids):
                replies.append(Told(reached, reached + stop, Reply(node.call_id, node.choice)))
            reached += stop
        return replies

    def answered(self, call: Call, system: str) -> None:
        """Remember the replies of a trustworthy call, so that a later history can continue them; `system` as in its plan."""
        root = Root(call.tools_hash, system)
        for number, choice in enumerate(call.choices):
            reply = Reply(call.call_id, number)
            self._lineage.register(reply, call.chain, choice.message, root)
            if choice.node is None:
                self._untraced.add(reply)
            else:
                self._ends[reply] = self.tree.end(choice.node)

    def take_unsaved(self) -> list[Node]:
        """Nodes made since the last call of this; the caller commits them."""
        nodes = self.tree.nodes[self._saved :]
        self._saved = len(self.tree.nodes)
        return nodes

    def give_back(self, nodes: Sequence[Node]) -> None:
        """A commit failed: its nodes go with the next one. Nodes are dense, so all from the first of them are unsaved."""
        if nodes:
            self._saved = min(self._saved, nodes[0].node_id)


def prompt_hash(ids: Int32Array) -> str:
    """xxh3_128 over little-endian int32, hex."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(ids, "<i4").data)
