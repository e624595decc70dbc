"""What a harness is told of a committed call."""

from polar.chat import Choice, Reply, TokenLogprob, Usage
from polar.errors import CaptureError
from polar.tokens.history import History
from polar.tokens.records import Call, ChoiceRecord


def reply_of(call: Call, history: History, *, logprobs: bool) -> Reply:
    """What a harness is told of a committed call; the same for its first delivery and for a replay."""
    choices: list[Choice] = []
    for choice in call.choices:
        if choice.finish_reason == "abort":
            raise CaptureError("aborted", f"call {call.call_id} has no reply")
        tokens = _token_logprobs(choice, history) if logprobs else ()
        choices.append(Choice(choice.message, choice.finish_reason, choice.stop_sequence, tokens))
    usage = Usage(call.prompt_tokens, call.sampled - call.tail)
    return Reply(call.call_id, call.model, int(call.timings.received), tuple(choices), usage)


def _token_logprobs(choice: ChoiceRecord, history: History) -> tuple[TokenLogprob, ...]:
    node = history.tree.nodes[choice.node] if choice.node is not None else None
    if node is None or node.logprobs is None:
        return ()
    pairs = zip(node.ids.tolist(), node.logprobs.tolist(), strict=True)
    return tuple(TokenLogprob(_spelled(token, history), logprob) for token, logprob in pairs)


def _spelled(token: int, history: History) -> str:
    """A token's text; in chat mode its number, in vLLM's own form."""
    return history.renderer.decode([token]) if history.renderer is not None else f"token_id:{token}"
