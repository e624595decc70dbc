"""What the self-test claims of an engine, judged from what the engine was seen to do: pure.

A claim is proven, or what was seen contradicts it (failed), or the engine cannot show it (unproven).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec import Struct

from polar.chat import Usage
from polar.engines.protocol import EngineFinish, LogprobsMode
from polar.errors import CaptureError
from polar.specs import Float32Array, Int32Array, VersionSpan
from polar.tokens.detectors import check_counts, check_logprobs, check_versions
from polar.tokens.rendering import ParsedReply, Renderer
from polar.tokens.stability import breaks
from polar.tokens.tree import common_prefix

Verdict = Literal["proven", "unproven", "failed"]

MOST_DELTA = 0.2  # nats, mean over a reply; bfloat16 has 0.03 to 0.05, another definition has whole nats
MOST_SPREAD = 2.0  # nats, mean over positions, of the sums in processed log-probabilities
LARGEST_VOCABULARY = 14.0  # natural logarithm of its size
MOST_AFTER = 32  # tokens that may be on their way when an abort is answered
UNSCORED = "the engine cannot score a given sequence"
MUTE = "the engine does not tokenize"


class Proof(Struct, frozen=True):
    """One claim and how it stands.

    Attributes:
        code: id of the fault that would break it (T05), or a word.
        detail: what was seen.
        advice: what to change, where it is not proven.
        trained: what is trained depends on it; a doubt about it needs `--accept-unproven`.
    """

    code: str
    says: str
    verdict: Verdict
    detail: str = ""
    advice: str = ""
    trained: bool = True


class SelfTest(Struct, frozen=True):
    """What an engine proved.

    Attributes:
        logprobs_mode: what its log-probabilities were found to be of; None where it cannot be found out.
        bos_id: what its tokenizer puts before every text; None for nothing, or where it does not tokenize.
    """

    proofs: tuple[Proof, ...]
    logprobs_mode: LogprobsMode | None = None
    bos_id: int | None = None

    def of(self, verdict: Verdict) -> tuple[Proof, ...]:
        """The proofs with that verdict."""
        return tuple(proof for proof in self.proofs if proof.verdict == verdict)

    @property
    def doubts(self) -> tuple[Proof, ...]:
        """What is unproven, and training would have to trust."""
        return tuple(proof for proof in self.of("unproven") if proof.trained)

    @property
    def line(self) -> str:
        """`9 proven, 1 unproven (L03: …)`."""
        told = [f"{len(self.of('proven'))} proven"]
        told += [f"{len(found)} {verdict} ({_named(found)})" for verdict in ("unproven", "failed") if (found := self.of(verdict))]
        return ", ".join(told)


def _named(proofs: Sequence[Proof]) -> str:
    return "; ".join(f"{proof.code}: {proof.detail or proof.says}" for proof in proofs)


@dataclass(frozen=True)
class Sampled:
    """A finished generation of the self-test.

    Attributes:
        prompt_ids: int32[p], as sent, or as the engine says that it rendered them.
        ids, logprobs: int32[n], float32[n].
        parsed: in chat mode, what it says.
        scores: float32[n], log-probabilities of `ids` by prefill; None where the engine cannot score.
    """

    prompt_ids: Int32Array
    ids: Int32Array
    logprobs: Float32Array
    finish: EngineFinish
    versions: tuple[VersionSpan, ...]
    usage: Usage | None
    parsed: ParsedReply | None = None
    scores: Float32Array | None = None


def counts(replies: Sequence[Sampled]) -> Proof:
    """T08: ids, log-probabilities and the engine's usage agree."""
    says = "as many ids as log-probabilities, and as many of both as the engine counts"
    advice = "the engine loses or invents tokens: update it, and turn off what changes its output (tool parsers, plugins)"

    def look() -> str:
        for reply in replies:
            check_counts(reply.ids.tolist(), reply.logprobs.tolist(), len(reply.prompt_ids), reply.usage)
        return f"{sum(len(reply.ids) for reply in replies)} tokens in {len(replies)} replies"

    return _detected("T08", says, advice, look)


def values(replies: Sequence[Sampled]) -> Proof:
    """L02: every log-probability is a number that a log-probability can be."""
    advice = "the engine shows sentinels or logits: serve it without speculative decoding, and with log-probabilities"

    def look() -> str:
        for reply in replies:
            check_logprobs(reply.logprobs)
        return (
            f"from {min(reply.logprobs.min() for reply in replies):.2f} to {max(reply.logprobs.max() for reply in replies):.2f}"
        )

    return _detected("L02", "log-probabilities are finite and not positive", advice, look)


def versions(replies: Sequence[Sampled]) -> Proof:
    """W01: each token has a policy version."""
    advice = "use an engine that tells which weights sampled a token"

    def look() -> str:
        found = {span.policy_version for reply in replies for span in check_versions(reply.versions, len(reply.ids))}
        return f"version {', '.join(map(str, sorted(found)))}"

    return _detected("W01", "each token has a policy version", advice, look)


def _detected(code: str, says: str, advice: str, look: Callable[[], str]) -> Proof:
    """What `look` saw proves the claim; what a detector refuses breaks it."""
    try:
        return Proof(code, says, "proven", look())
    except CaptureError as error:
        return Proof(code, says, "failed", str(error), advice)


def stop(reply: Sampled | None, stop_ids: Sequence[int]) -> Proof:
    """T06: the id that ended a reply is the last of its ids.

    Args:
        reply: one that had to meet one of `stop_ids`; None where none could be made to.
    """
    says = "a reply ends with the id that stopped it"
    advice = "have the engine honour stop ids and keep them in its output"
    if reply is None:
        return Proof("T06", says, "unproven", "no reply could be made to end", advice)
    places = [place for place, token in enumerate(reply.ids.tolist()) if token in stop_ids]
    if reply.finish != "stop":
        return Proof("T06", says, "failed", f"the reply met a stop id and went on to finish {reply.finish!r}", advice)
    if places != [len(reply.ids) - 1]:
        return Proof("T06", says, "failed", f"the reply stopped, and its {len(reply.ids)} ids do not end with a stop id", advice)
    return Proof("T06", says, "proven", f"id {reply.ids[-1]}")


def bos(added: Sequence[int] | None, reply: Sampled) -> Proof:
    """T05: a prompt begins with one BOS, or with none.

    Args:
        added: ids that the server's tokenizer puts before every text; None where it does not tokenize.
    """
    says = "a prompt begins with one BOS at most"
    if reply.usage is not None and (more := reply.usage.prompt_tokens - len(reply.prompt_ids)):
        detail = f"{len(reply.prompt_ids)} prompt ids were sent, the engine counts {reply.usage.prompt_tokens}"
        return Proof("T05", says, "failed", detail, f"have the engine add nothing to ids that it is given ({more:+d})")
    if added is None:
        return Proof("T05", says, "unproven", MUTE, "update the engine")
    start = reply.prompt_ids[:2].tolist()
    if len(added) > 1 and added[0] == added[1]:
        advice = "mend the tokenizer's files: its post-processor adds BOS to a text that has one"
        return Proof("T05", says, "failed", f"the server's tokenizer begins every text with {list(added)}", advice)
    if added and start == [added[0], added[0]]:
        advice = "take BOS out of the chat template, or out of the tokenizer's post-processor"
        return Proof("T05", says, "failed", f"the prompt begins with {start}", advice)
    return Proof("T05", says, "proven", f"id {added[0]}" if added else "none")


def vocabulary(wrong: str | None, stop_ids: Sequence[int]) -> Proof:
    """T07: server and renderer have one vocabulary, end of turn and all.

    Args:
        wrong: what differs; "" for nothing, None where the server does not tokenize.
    """
    says = "the engine's vocabulary is the renderer's, and so is its end of turn"
    if wrong is None:
        return Proof("T07", says, "unproven", MUTE, "update the engine")
    if wrong:
        return Proof("T07", says, "failed", wrong, "name the directory of the model that the engine serves with --model")
    return Proof("T07", says, "proven", f"turns end with {', '.join(map(str, stop_ids))}")


def prefill(reply: Sampled) -> Proof:
    """L03: the log-probabilities of a reply at temperature 1 are those of a plain prefill."""
    says = "log-probabilities are those of a prefill"
    if reply.scores is None:
        return Proof("L03", says, "unproven", UNSCORED, "train with an engine that can (vLLM, SGLang, the embedded one)")
    if len(reply.scores) != len(reply.logprobs):
        return Proof("L03", says, "failed", f"{len(reply.ids)} ids have {len(reply.logprobs)} log-probabilities")
    delta = float(np.abs(reply.logprobs - reply.scores).mean())
    if not delta <= MOST_DELTA:
        advice = "serve log-probabilities, not logits, and the weights that are meant (vLLM: --logprobs-mode raw_logprobs)"
        return Proof("L03", says, "failed", f"mean δ {delta:.3g} nats over {len(reply.ids)} tokens", advice)
    return Proof("L03", says, "proven", f"mean δ {delta:.1e} nats over {len(reply.ids)} tokens")


def mode(reply: Sampled, temperature: float) -> tuple[Proof, LogprobsMode | None]:
    """L01: whether log-probabilities are of the raw logits, or of the processed ones, from a reply at a high temperature.

    Processed values are `r / temperature - c`, where r is the raw value and c the logarithm of a sum over the vocabulary, which
    depends on the position, but not much where the temperature has flattened the distribution. The nearer description is
    the true one, if it is near at all.
    """
    says = "log-probabilities are known to be of raw or of processed logits"
    if reply.scores is None:
        return Proof(
            "L01", says, "unproven", UNSCORED, "train at temperature 1 without truncation: there both are the same"
        ), None
    advice = "use an engine whose log-probabilities are defined (vLLM: --logprobs-mode)"
    if len(reply.scores) != len(reply.logprobs):
        return Proof("L01", says, "failed", f"{len(reply.ids)} ids have {len(reply.logprobs)} log-probabilities", advice), None
    raw = float(np.abs(reply.logprobs - reply.scores).mean())
    sums = reply.scores / temperature - reply.logprobs
    processed = float(np.abs(sums - np.median(sums)).mean())
    found: LogprobsMode = "raw" if raw <= processed else "processed"
    possible = sums.min() >= -MOST_DELTA and sums.max() <= (1 - 1 / temperature) * LARGEST_VOCABULARY + MOST_DELTA
    if not (raw <= MOST_DELTA if found == "raw" else processed <= MOST_SPREAD and possible):
        detail = (
            f"at temperature {temperature:g} they are {raw:.3g} nats from raw values, and {processed:.3g} from processed ones"
        )
        return Proof("L01", says, "failed", detail, advice), None
    return Proof("L01", says, "proven", found), found


def abort(finish: EngineFinish | None, tokens: int, after: int, *, told: bool = True) -> Proof:
    """C03: a generation ends when it is told to.

    Args:
        finish: how the aborted generation ended, None for not at all.
        tokens: that it had, `after` of them once the abort had been answered.
        told: it was told to; a reply that comes whole is over before anybody can.
    """
    says = "an abort ends a generation"
    advice = "update the engine: what a harness gave up goes on and holds its place"
    if finish == "abort":
        return Proof("C03", says, "proven", f"after {tokens} tokens", trained=False)
    if (finish == "stop" and after < MOST_AFTER) or (finish is not None and not told):  # by chance, before the abort came
        return Proof("C03", says, "unproven", "the reply had ended already", advice, trained=False)
    detail = "it did not end" if finish is None else f"it went on to finish {finish!r}, {after} tokens after the abort"
    return Proof("C03", says, "failed", detail, advice)


def second_turn(first: Sampled, second: Int32Array) -> Proof:
    """T01, in chat mode: the second turn's prompt goes on from the first turn's ids. Where it does not, histories fork.

    Args:
        second: int32[n], the prompt of the second turn as the engine rendered it.
    """
    says = "a second turn goes on from the ids of the first"
    stored = np.concatenate([first.prompt_ids, first.ids])
    same = common_prefix(stored, second)
    if same == len(stored):
        return Proof("T01", says, "proven", f"all {same} ids", trained=False)
    detail = f"drifts at id {same} of {len(stored)}: such histories fork"
    return Proof("T01", says, "unproven", detail, "a renderer for the model would keep them one (--renderer)", trained=False)


def prefix_stability(renderer: Renderer) -> Proof:
    """T04: a conversation that grows reads as the model's template would have written it; on probe dialogues with tools."""
    says = "a conversation grows to what its history renders to"
    found = breaks(renderer)
    for broken in sorted(found, key=lambda each: not each.fatal):
        detail = f"in {broken.dialogue!r}, behind message {broken.message + 1}: {broken.why}"
        if broken.fatal:
            advice = "have the engine render (--renderer none): histories that drift fork, and stay exact"
            return Proof("T04", says, "failed", detail, advice)
        advice = "none is needed: what goes on keeps what was sampled, and what forks sees what the template makes of it"
        return Proof("T04", says, "unproven", detail, advice, trained=False)
    return Proof("T04", says, "proven")
