"""Which earlier reply does a history continue?

A history is fingerprinted message by message, in a chain rooted in its tools. A reply's chain value names the call that
gave it. Fingerprints hold what a policy's words mean, not how a harness spells them: arguments are compared parsed,
reasoning is ignored. Ids that we minted narrow the candidates; they never widen them. Ambiguity forks, nothing is guessed.
"""

from collections.abc import Iterable, Sequence

import msgspec
import xxhash
from msgspec import Struct

from polar.chat import ImagePart, Message, Tool
from polar.ids import parse_minted

_canonical = msgspec.json.Encoder(order="sorted")


class Reply(Struct, frozen=True):
    """A reply that a history may continue."""

    call_id: str
    choice: int


class Continuation(Struct, frozen=True):
    """What lineage proposes.

    Attributes:
        reply: the reply whose stored ids the prompt starts with; None for a root or a fork.
        known: messages covered by `reply`; what follows is new.
        fork_reason: why a history that names its past cannot be spliced; "" for a continuation or a first call.
        left: for a fork, the call that the history names.
    """

    reply: Reply | None
    known: int = 0
    fork_reason: str = ""
    left: str = ""


def tools_root(tools: Sequence[Tool]) -> str:
    """Root of the chain: the tools as they are rendered, in their order."""
    digest = xxhash.xxh3_128(b"tools")
    for tool in tools:
        digest.update(msgspec.msgpack.encode((tool.name, tool.description, bytes(tool.parameters))))
    return digest.hexdigest()


def fingerprint(message: Message, *, trim: bool = False) -> bytes:
    """What a message means, as 16 bytes. With `trim`, whitespace around an assistant's text is nothing (`trim_text`)."""
    calls = tuple((call.name, meaning(call.arguments)) for call in message.tool_calls)
    text = message.text.strip() if trim and message.role == "assistant" else message.text
    images = tuple(part.data or part.url for part in message.content if isinstance(part, ImagePart))
    said = (message.role, text, calls, images) if images else (message.role, text, calls)
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(said))


def chain(root: str, fingerprints: Iterable[bytes]) -> list[str]:
    """Chain values before the first message (`root`) and after each; one more than messages."""
    values = [root]
    extend(values, fingerprints)
    return values


def extend(values: list[str], fingerprints: Iterable[bytes]) -> None:
    """Go on with a chain."""
    for each in fingerprints:
        values.append(xxhash.xxh3_128_hexdigest(values[-1].encode() + each))


def link(value: str, message: Message, *, trim: bool = False) -> str:
    """The chain's value after `message`, given the one before it."""
    return chain(value, [fingerprint(message, trim=trim)])[-1]


def chain_values(root: str, messages: Sequence[Message], *, trim: bool = False) -> list[str]:
    """`chain` of messages that nobody has fingerprinted yet."""
    return chain(root, (fingerprint(message, trim=trim) for message in messages))


class Root(Struct, frozen=True):
    """What a prompt stands on: hashes of its tools and of its leading system messages."""

    tools: str
    system: str


class Lineage:
    """The replies of one session by their chain values; `trim` as in `link`."""

    def __init__(self, *, trim: bool = False) -> None:
        self._trim = trim
        self._replies: dict[str, list[Reply]] = {}
        self._roots: dict[str, Root] = {}

    def register(self, reply: Reply, prompt_chain: str, message: Message, root: Root) -> None:
        """Remember that `reply` said `message` after `prompt_chain`; `root` is that of its prompt."""
        self._replies.setdefault(link(prompt_chain, message, trim=self._trim), []).append(reply)
        self._roots[reply.call_id] = root

    def find(self, values: Sequence[str], messages: Sequence[Message]) -> Continuation:
        """The deepest known reply in a history, given its `chain_values`."""
        last = next((i for i in range(len(messages) - 1, -1, -1) if messages[i].role == "assistant"), None)
        if last is None:
            return Continuation(None)
        named = _named_reply(messages[last])
        left = named.call_id if named else ""
        candidates = self._replies.get(values[last + 1], [])
        if named:
            candidates = [reply for reply in candidates if reply == named]
        if len(candidates) == 1:
            return Continuation(candidates[0], last + 1)
        reason = "ambiguous" if candidates else self._why(left, values, messages)
        return Continuation(None, 0, reason, left if left in self._roots else "")

    def _why(self, left: str, values: Sequence[str], messages: Sequence[Message]) -> str:
        if left in self._roots:
            if self._roots[left].tools != values[0]:
                return "tools_changed"
            if self._roots[left].system != system_text(messages):
                return "system_changed"
        return "history_rewritten"


def system_text(messages: Sequence[Message]) -> str:
    """Hash of the system messages that a history starts with."""
    digest = xxhash.xxh3_128()
    for message in messages:
        if message.role != "system":
            break
        digest.update(message.text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _named_reply(message: Message) -> Reply | None:
    """The reply that a message's own identifiers name; None where there are none or they disagree."""
    minted = (*(call.id for call in message.tool_calls), *message.minted)
    named = {parsed for value in minted if (parsed := parse_minted(value))}
    return Reply(*named.pop()) if len(named) == 1 else None


def meaning(arguments: str) -> bytes:
    """Arguments in one spelling: parsed and sorted where they are JSON, else as written."""
    try:
        return _canonical.encode(_one_spelling(msgspec.json.decode(arguments.encode())))
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return arguments.encode("utf-8", "surrogatepass")


def _one_spelling(value: object) -> object:
    """Numbers of one value in one type: JavaScript gives `1.0` back as `1`."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_one_spelling(item) for item in value]
    if isinstance(value, dict):
        return {key: _one_spelling(item) for key, item in value.items()}
    return value


def shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many leading values two lists share."""
    if one == other[: len(one)]:  # the common case, at the speed of C
        return len(one)
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
