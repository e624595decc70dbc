"""What is checked of the calls of a session, and of the spans that they sampled."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import xxhash

from polar.audit.ground import Ground
from polar.errors import CaptureError
from polar.ids import tool_call_id
from polar.specs import Finding, SamplingSpec
from polar.tokens.detectors import check_extras, check_logprobs, check_stop, check_versions
from polar.tokens.history import prompt_hash
from polar.tokens.lineage import chain, fingerprint, tools_root
from polar.tokens.records import Call, Node, Position
from polar.tokens.rendering import Renderer, ReplyParser
from polar.trajectory.builders import Captured


def in_tree(call: Call) -> bool:
    """Whether a call's tokens are in the tree: not those of somebody else's model, or of an engine that shows no ids."""
    return not call.untrained or call.prompt != Position() or bool(_sampled(call))


def has_spans(call: Call) -> bool:
    """Whether as many ids as it sampled are to be stored of a call: of one that failed nothing is kept."""
    return in_tree(call) and (call.status == "ok" or bool(_sampled(call)))


def continues(call: Call, by_id: Mapping[str, Call]) -> bool:
    """Whether a prompt says that it is spliced from what is stored of another call."""
    return call.parent_call in by_id and not call.fork_reason and in_tree(call)


def was_asked(call: Call) -> bool:
    """Whether the policy was asked: not if the call failed before its prompt was planned, or another model answered."""
    return bool(call.resolved or call.sampled) and call.untrained != "external"


def check_prompts(calls: Sequence[Call], ground: Ground) -> Iterator[Finding]:
    """`prompt_hash`, `prompt_tokens`: the path in the tree is what went to the engine."""
    for call in filter(in_tree, calls):
        ids = ground.ids[ground.path(call.prompt)]
        if len(ids) != call.prompt_tokens:
            yield Finding("prompt_tokens", f"the path has {len(ids)} ids, the prompt had {call.prompt_tokens}", call.call_id)
        if (found := prompt_hash(ids)) != call.prompt_hash:
            yield Finding("prompt_hash", f"the path hashes to {found}, the prompt to {call.prompt_hash}", call.call_id)


def check_lineage(calls: Sequence[Call], ground: Ground) -> Iterator[Finding]:
    """`T01`, `lineage`: what a call continues is stored, and the prompt starts with it."""
    ordinals = {call.call_id: call.ordinal for call in calls}
    by_id = {call.call_id: call for call in calls}
    for call in calls:
        for said, name in (("continues", call.parent_call), ("replaces", call.replaces)):
            if name and ordinals.get(name, call.ordinal) >= call.ordinal:
                yield Finding("lineage", f"it {said} call {name}, of which nothing was stored before it", call.call_id)
        if continues(call, by_id):
            yield from _check_splice(call, by_id[call.parent_call], ground)


def _check_splice(call: Call, parent: Call, ground: Ground) -> Iterator[Finding]:
    # The place after a reply's last token is no continuation: something of the new turn has to follow.
    ends = [Position(node, len(ground.nodes[node].ids)) for node in _sampled(parent)]
    if not any(call.prompt != end and ground.goes_through(call.prompt, end.node) for end in ends):
        yield Finding(
            "T01", f"the prompt does not start with the prompt and the sampled ids of call {parent.call_id}", call.call_id
        )


def check_owners(calls: Sequence[Call], ground: Ground) -> Iterator[Finding]:
    """`owner`, `place`: sampled spans and choices belong together one to one."""
    by_id = {call.call_id: call for call in calls}
    owners: dict[int, int] = {}
    for call in calls:
        for number, choice in enumerate(call.choices):
            if choice.node is not None:
                owners[choice.node] = owners.get(choice.node, 0) + 1
                yield from _check_choice(call, number, choice.node, ground)
            elif call.status == "ok" and in_tree(call):
                yield Finding("owner", f"choice {number} was answered, and no sampled span is stored", call.call_id)
    for node in ground.nodes:
        owner = by_id.get(node.call_id)
        if node.kind == "sampled" and (owner is None or owners.get(node.node_id, 0) != 1):
            whose = f"{owners.get(node.node_id, 0)} calls" if owner else f"call {node.call_id}, which is not stored"
            yield Finding("owner", f"sampled node {node.node_id} ({len(node.ids)} tokens) belongs to {whose}", node.call_id)


def _check_choice(call: Call, number: int, node_id: int, ground: Ground) -> Iterator[Finding]:
    node = ground.nodes[node_id]
    if (node.call_id, node.choice) != (call.call_id, number):
        named = f"choice {node.choice} of call {node.call_id}"
        yield Finding("owner", f"choice {number} is node {node_id}, which says that it is {named}", call.call_id)
    if node.parent != call.prompt:
        begins, ends = ((at.node, at.offset) for at in (node.parent, call.prompt))
        yield Finding("place", f"node {node_id} hangs at {begins}, the prompt ends at {ends}", call.call_id)


def check_sampling(calls: Sequence[Call], spec: SamplingSpec) -> Iterator[Finding]:
    """`sampling`: the engine was asked for what the trainer chose, whatever the harness asked for."""
    wanted = {"temperature": spec.temperature, "top_p": spec.top_p, "top_k": spec.top_k}
    for call in filter(was_asked, calls):
        said = {name: call.resolved.get(name) for name in wanted}
        if said != wanted:
            yield Finding("sampling", f"it was sampled with {said}, its session says {wanted}", call.call_id)


def check_sampled(calls: Sequence[Call], ground: Ground, renderer: Renderer | None) -> Iterator[Finding]:
    """`T08`, `L02`, `W01`, and with a renderer `T06`: the detectors that watched the calls, over what was stored."""
    for call in calls:
        nodes = [ground.nodes[node] for node in _sampled(call)]
        counted = sum(len(node.ids) for node in nodes)
        if has_spans(call) and counted + call.tail != call.sampled:
            yield Finding("T08", f"the call sampled {call.sampled} tokens, {counted} are stored", call.call_id)
    stopped = {
        choice.node
        for call in calls
        for choice in call.choices
        if choice.finish_reason in ("stop", "tool_calls") and not choice.stop_sequence
    }
    for node in ground.nodes:
        if node.kind == "sampled":
            yield from _check_node(node, node.node_id in stopped, renderer)


def _check_node(node: Node, stopped: bool, renderer: Renderer | None) -> Iterator[Finding]:
    assert node.logprobs is not None
    if len(node.logprobs) != len(node.ids):
        yield Finding("T08", f"{len(node.ids)} sampled ids have {len(node.logprobs)} log-probabilities", node.call_id)
    try:
        check_extras(node.extras, len(node.ids))
        check_logprobs(node.logprobs)
    except CaptureError as error:
        yield _finding(error, node.call_id)
    try:
        check_versions(node.versions, len(node.ids))
    except CaptureError as error:
        yield _finding(error, node.call_id)
    try:
        if renderer is not None:
            check_stop(node.ids.tolist(), stopped, renderer.stop_ids)
    except CaptureError as error:
        yield _finding(error, node.call_id)


def check_replies(captured: Captured, ground: Ground, renderer: Renderer | None) -> Iterator[Finding]:
    """`tool_call_id`, and with a renderer `reply`: what the harness was told is what the ids say."""
    for call in captured.calls:
        for number, choice in enumerate(call.choices):
            for index, tool_call in enumerate(choice.message.tool_calls):
                if tool_call.id != (expected := tool_call_id(call.call_id, number, index)):
                    said = f"tool call {index} of choice {number} is {tool_call.id!r}, not {expected!r}"
                    yield Finding("tool_call_id", said, call.call_id)
            if renderer is not None and choice.node is not None:
                parser = renderer.parser(captured.tools[call.tools_hash])
                yield from _check_reply(call, number, ground.nodes[choice.node], parser)


def _check_reply(call: Call, number: int, node: Node, parser: ReplyParser) -> Iterator[Finding]:
    message = call.choices[number].message
    parser.push(node.ids.tolist())
    _, parsed = parser.finish()
    told = (message.text, message.reasoning, tuple((tool.name, tool.arguments) for tool in message.tool_calls))
    if told != (_shown(parsed.text, call.choices[number].stop_sequence), parsed.reasoning, parsed.tool_calls):
        yield Finding("reply", f"choice {number} told the harness something else than its {len(node.ids)} ids say", call.call_id)


def _shown(text: str, stop: str) -> str:
    """What a harness is shown of a text that a stop text ended."""
    return text.partition(stop)[0] if stop else text


def check_messages(captured: Captured) -> Iterator[Finding]:
    """`message`: content is what its address says, and each call's fingerprint is that of its messages."""
    for digest, message in captured.messages.items():
        if xxhash.xxh3_128_hexdigest(msgspec.json.encode(message)) != digest:
            yield Finding("message", f"message {digest} has other content")
    for digest, tools in captured.tools.items():
        if tools_root(tools) != digest:
            yield Finding("message", f"tools {digest} have other content")
    prints = {
        trim: {digest: fingerprint(message, trim=trim) for digest, message in captured.messages.items()} for trim in (False, True)
    }
    for call in captured.calls:
        # A call that failed before its prompt was planned has no fingerprint.
        known = prints["trim_text" in call.normalisers]
        if call.chain and chain(call.tools_hash, (known[digest] for digest in call.message_hashes))[-1] != call.chain:
            yield Finding("message", "its fingerprint is not that of its messages", call.call_id)


def sampled_calls(calls: Sequence[Call]) -> Mapping[int, Call]:
    """The call that each sampled node is a choice of."""
    return {node: call for call in calls for node in _sampled(call)}


def _sampled(call: Call) -> list[int]:
    return [choice.node for choice in call.choices if choice.node is not None]


def _finding(error: CaptureError, call_id: str) -> Finding:
    return Finding(error.code, str(error).removeprefix(f"{error.code}: "), call_id)
