"""What the audit proves of a run, each claim under the code that its findings carry.

Codes that are fault ids (`T06`) mean what they mean in docs/faithfulness.md: the detector that watched the call is run
again over what was stored.
"""

from typing import Literal

from msgspec import Struct

Unit = Literal[
    "sessions",
    "calls",
    "continued calls",
    "answers",
    "tool calls",
    "nodes",
    "sampled spans",
    "sampled tokens",
    "traces",
    "messages",
]


class Claim(Struct, frozen=True):
    """One thing that is proven.

    Attributes:
        says: what holds if there is no finding.
        unit: what it is said of.
        needs: what it cannot be proven without: a `renderer`, which reads what ids say, or the `ledger` of a run.
    """

    says: str
    unit: Unit
    needs: Literal["", "renderer", "ledger"] = ""


CLAIMS: dict[str, Claim] = {
    "tree": Claim("the token tree is whole: parents come first, spans begin inside them", "nodes"),
    "prompt_hash": Claim("each prompt's path has the ids that went to the engine, by their hash", "calls"),
    "prompt_tokens": Claim("each prompt's path is as long as the prompt that went to the engine", "calls"),
    "T01": Claim("a prompt that continues a reply starts with its stored ids, to the token", "continued calls"),
    "lineage": Claim("the calls that a call continues or replaces are stored, and came before it", "calls"),
    "owner": Claim("each sampled span belongs to exactly one call and choice", "sampled spans"),
    "place": Claim("each sampled span hangs exactly at the end of its call's prompt", "answers"),
    "T08": Claim("each call has as many stored ids and log-probabilities as it sampled", "calls"),
    "sampling": Claim("each call was sampled with its session's temperature, top_p and top_k", "calls"),
    "L02": Claim("each log-probability is finite, not positive, and no sentinel", "sampled tokens"),
    "W01": Claim("each sampled token has exactly one policy version", "sampled tokens"),
    "T06": Claim("a stop id ends each finished reply, and stands nowhere else", "sampled spans", needs="renderer"),
    "reply": Claim("the harness was told what the sampled ids say", "answers", needs="renderer"),
    "tool_call_id": Claim("each minted tool-call id names its call, choice and place", "tool calls"),
    "message": Claim("messages and tools have the content that they are stored under", "messages"),
    "build": Claim("both builders take the session", "sessions"),
    "path": Claim("each trace of either builder is a path of the token tree, id for id", "traces"),
    "mask": Claim("each trainable token is trained in exactly one trace, every other in none", "sampled tokens"),
    "mask_values": Claim("log-probability and version under the mask are the stored ones, bit for bit", "sampled tokens"),
    "accounting": Claim("sampled = trained + excluded, counted again from the calls", "sessions"),
    "weights": Claim(
        "the traces of a scored session share its reward, and 1 by their trained tokens", "sessions", needs="ledger"
    ),
    "ledger": Claim("the ledger knows each session with its calls, traces and tokens", "sessions", needs="ledger"),
    "frozen": Claim("each finished session is closed to further calls", "sessions", needs="ledger"),
    "unreadable": Claim("all that calls name is stored and can be decoded", "sessions"),
}
