"""The token side of one session: tree, lineage and renderer together turn a request's messages into prompt ids.

A prompt that continues a known reply is that reply's stored path plus the rendered new messages, so it starts with what
the policy saw and said, to the token. Every other prompt is rendered whole, and shares with the tree what happens to agree.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from polar.chat import Message, Tool
from polar.specs import Int32Array
from polar.tokens.lineage import Continuation, Lineage, Reply, Root, chain, fingerprint, system_text, tools_root
from polar.tokens.records import Call, Node, Position
from polar.tokens.rendering import Renderer
from polar.tokens.tree import EMPTY, TokenTree


@dataclass(frozen=True)
class Plan:
    """How a prompt will be made.

    Attributes:
        tools_hash: fingerprint of the tools, root of the chain.
        chain: fingerprint of tools and all messages.
        start: where in the tree the new ids begin.
        stopped: the reply at `start` ends with a stop id (meaningless at the root).
        new: messages to render.
    """

    continuation: Continuation
    tools_hash: str
    chain: str
    start: Position
    stopped: bool
    tools: tuple[Tool, ...]
    new: tuple[Message, ...]

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


class History:
    """Tree and lineage of one session. Owned by one event loop. `trim`: see `lineage.link`."""

    def __init__(self, renderer: Renderer, nodes: Iterable[Node] = (), *, trim: bool = False) -> None:
        self.renderer = renderer
        self.tree = TokenTree(nodes)
        self._saved = len(self.tree.nodes)
        self._trim = trim
        self._lineage = Lineage(trim=trim)
        self._known: dict[str, bytes] = {}  # address → fingerprint
        self._ends: dict[tuple[str, int], Position] = {}

    def plan(self, messages: Sequence[Message], tools: Sequence[Tool], addresses: Sequence[str] = ()) -> Plan:
        """Decide what a prompt continues. Cheap; renders nothing.

        Args:
            addresses: those of the messages, then that of the tools, where they are known: what came before is not read again.
        """
        root = addresses[-1] if addresses else tools_root(tools)
        values = chain(root, self._fingerprints(messages, addresses))
        continuation = self._lineage.find(values, messages)
        if not self.tree.nodes:  # assistant messages before anybody was asked are the harness's own: examples, not history
            continuation = Continuation(None)
        if continuation.reply is None:
            return Plan(continuation, root, values[-1], EMPTY, True, tuple(tools), tuple(messages))
        start = self._ends[continuation.reply.call_id, continuation.reply.choice]
        stopped = int(self.tree.nodes[start.node].ids[-1]) in self.renderer.stop_ids
        return Plan(continuation, root, values[-1], start, stopped, tuple(tools), tuple(messages[continuation.known :]))

    def _fingerprints(self, messages: Sequence[Message], addresses: Sequence[str]) -> Iterator[bytes]:
        if not addresses:
            yield from (fingerprint(message, trim=self._trim) for message in messages)
            return
        for message, address in zip(messages, addresses[:-1], strict=True):
            if (known := self._known.get(address)) is None:
                known = self._known[address] = fingerprint(message, trim=self._trim)
            yield known

    def render(self, plan: Plan) -> Int32Array:
        """The ids that follow `plan.start`; pure, may run in any thread."""
        if plan.continuation.reply is None:
            return self.renderer.render(plan.new, plan.tools)
        return self.renderer.bridge(plan.stopped, plan.new)

    def place(self, plan: Plan, ids: Int32Array, call_id: str) -> Position:
        """Put rendered ids into the tree; where the prompt ends."""
        return self.tree.add_context(plan.start, ids, call_id)

    def answered(self, call: Call, messages: Sequence[Message]) -> None:
        """Remember the replies of a trustworthy call to `messages`, so that a later history can continue them."""
        root = Root(call.tools_hash, system_text(messages))
        for number, choice in enumerate(call.choices):
            if choice.node is not None:
                self._ends[call.call_id, number] = self.tree.end(choice.node)
                self._lineage.register(Reply(call.call_id, number), call.chain, choice.message, root)

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
    return xxhash.xxh3_128_hexdigest(ids.astype("<i4", copy=False).tobytes())
