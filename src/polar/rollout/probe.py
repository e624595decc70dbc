"""A scripted session: what a harness's probe says, as the policy would write it, and whether all of it was recorded."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from polar.engines.script import Scripted, ScriptedCall
from polar.engines.scripted import Logged
from polar.harnesses.protocol import Turn
from polar.tokens.records import Call
from polar.tokens.tree import TokenTree
from polar.trajectory.builders import Captured

FINAL = "Done: nothing is left to do."
TOOLS = "</tools>"  # what a prompt with tools holds
Script = Callable[[ScriptedCall], Scripted]


def play(turns: Sequence[Turn], final: str = FINAL) -> Script:
    """A policy that answers with the turn that the prompt has come to, and with `final` after the last.

    Assistant turns of the first prompt are examples, and do not count. A prompt without tools (for a title, say) gets no tool
    calls, but `final`.
    """
    examples: list[int] = []

    def reply(call: ScriptedCall) -> Scripted:
        if not examples:
            examples.append(call.turn)
        place = call.turn - examples[0]
        turn = turns[place] if 0 <= place < len(turns) else Turn(final)
        served = not turn.calls or TOOLS in call.prompt_text
        return Scripted(spelled(turn) if served else final, tokens_per_chunk=5)

    return reply


def spelled(turn: Turn) -> str:
    """A turn as text with Hermes tool calls, spaced as no serialiser spaces them: who re-serialises a history shows."""
    calls = "\n".join(_call(name, arguments) for name, arguments in turn.calls)
    return f"{turn.text}\n{calls}" if turn.text and calls else turn.text + calls


def _call(name: str, arguments: dict[str, object]) -> str:
    written = msgspec.json.format(msgspec.json.encode(arguments), indent=1).decode()
    return f'<tool_call>\n{{"name":  "{name}", "arguments": {written}}}\n</tool_call>'


def differences(captured: Captured, log: Sequence[Logged]) -> Iterator[str]:
    """Where the record of a session is not what the policy was asked and sampled, by its own log; nothing where it is."""
    tree, entries = TokenTree(captured.nodes), {entry.request_id: entry for entry in log}
    for request_id in entries.keys() - {call.call_id for call in captured.calls}:
        yield f"generation {request_id} of the policy is no recorded call"
    for call in captured.calls:
        entry = entries.get(call.call_id)
        if entry is not None:
            yield from _differences(call, entry, tree)
        elif call.status == "ok":
            yield f"call {call.call_id} has an answer that the policy did not give"


def _differences(call: Call, entry: Logged, tree: TokenTree) -> Iterator[str]:
    if tree.path(call.prompt).tolist() != list(entry.prompt_ids):
        yield f"call {call.call_id} is recorded with another prompt than the policy got"
    for choice in call.choices[:1]:
        if choice.node is not None:
            node, (ids, logprobs) = tree.nodes[choice.node], answer_of(call, entry)
            assert node.logprobs is not None
            whole = len(ids) if call.status == "ok" else len(node.ids)  # of an aborted one more was sampled than arrived
            if node.ids.tolist() != ids[:whole]:
                yield f"call {call.call_id} is recorded with other tokens than the policy sampled"
            if node.logprobs.tolist() != logprobs[:whole]:
                yield f"call {call.call_id} is recorded with other log-probabilities than the policy's"


def answer_of(call: Call, entry: Logged) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities that belong to the answer: without what was sampled after a stop text."""
    whole = len(entry.ids) - call.tail
    return entry.ids[:whole], entry.logprobs[:whole]
