"""The trainable answers of a session, and the chains in which each goes on from all of the one before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import Struct

from polar.errors import CaptureError
from polar.specs import ExcludedReason, Int32Array
from polar.tokens.detectors import check_logprobs
from polar.tokens.records import ROOT, Call, Node
from polar.tokens.tree import TokenTree

NEWEST = 2**31 - 1  # policy version: they are int32, and below 0 stands for none


class Sampling(Struct, frozen=True):
    """How the tokens of a call were sampled; `max_tokens` is no part of it, for it changes no probability."""

    temperature: float
    top_p: float
    top_k: int
    logprobs_mode: str


@dataclass(eq=False)
class Answer:
    """One trainable sampled node.

    Attributes:
        parent: the nearest trainable answer on the way to it; `clean` says that all of that is on the way.
        followers: the answers whose clean parent it is.
        below: answers of the tree of followers that begins here.
    """

    node: Node
    call: Call
    parent: "Answer | None" = None
    clean: bool = True
    followers: "list[Answer]" = field(default_factory=list)
    below: int = 1

    @property
    def order(self) -> tuple[int, int]:
        return self.call.ordinal, self.node.choice


def trainable(calls: Sequence[Call], tree: TokenTree, excluded: Mapping[str, ExcludedReason]) -> list[Answer]:
    """Trainable answers in order of their calls, each knowing the nearest trainable answer on its path.

    Raises:
        CaptureError: a call has other tokens than it sampled (T08), or one that no policy could have sampled (L02).
    """
    by_node: dict[int, Answer] = {}
    for call in calls:
        if call.call_id not in excluded:
            answers = [Answer(tree.nodes[choice.node], call) for choice in call.choices if choice.node is not None]
            _check_tokens(call, answers)
            by_node |= {answer.node.node_id: answer for answer in answers}
    _find_parents(by_node, tree)
    for _, answer in sorted(by_node.items(), reverse=True):
        if answer.parent is not None and answer.clean:
            answer.parent.below += answer.below
            answer.parent.followers.append(answer)
    return sorted(by_node.values(), key=lambda answer: answer.order)


def _check_tokens(call: Call, answers: Sequence[Answer]) -> None:
    """Detectors saw these tokens when they came, but whatever changed since would go into the loss."""
    stored = sum(len(answer.node.ids) for answer in answers)
    if stored + call.tail != call.sampled:
        raise CaptureError("T08", f"call {call.call_id} sampled {call.sampled} tokens, {stored} are stored, {call.tail} dropped")
    for answer in answers:
        assert answer.node.logprobs is not None
        try:
            check_logprobs(answer.node.logprobs)
        except CaptureError as error:
            said = str(error).removeprefix(f"{error.code}: ")
            raise CaptureError(error.code, f"call {call.call_id} has {said}") from None


def _find_parents(by_node: Mapping[int, Answer], tree: TokenTree) -> None:
    nearest: list[tuple[Answer | None, bool]] = []  # of each node: the answer above it, and whether all of that is above it
    for node in tree.nodes:
        at = tree.inner(node.parent)
        above = by_node.get(at.node)
        if above is not None:
            nearest.append((above, at.offset == len(above.node.ids)))
        else:
            nearest.append(nearest[at.node] if at.node != ROOT else (None, True))
        if node.node_id in by_node:
            answer = by_node[node.node_id]
            answer.parent, answer.clean = nearest[-1]


def chains(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Maximal chains; where several answers follow one, the one with the most below it goes on, then the earliest."""
    heirs = {
        answer: max(answer.followers, key=lambda follower: (follower.below, -follower.order[0], -follower.order[1]))
        for answer in answers
        if answer.followers
    }
    inherited = set(heirs.values())
    found: list[list[Answer]] = []
    for first in answers:
        if first not in inherited:
            chain = [first]
            while chain[-1] in heirs:
                chain.append(heirs[chain[-1]])
            found.append(chain)
    return found


def sampling(call: Call) -> Sampling:
    """How a call was sampled.

    Raises:
        CaptureError: L01, the call does not say.
    """
    try:
        temperature, top_p, top_k = (call.resolved[name] for name in ("temperature", "top_p", "top_k"))
    except KeyError as missing:
        raise CaptureError("L01", f"call {call.call_id} does not say with which {missing.args[0]} it was sampled") from None
    return Sampling(temperature, top_p, int(top_k), call.logprobs_mode)


def token_versions(answer: Answer) -> Int32Array:
    """Policy version of each token of an answer; int32[n].

    Raises:
        CaptureError: W01, a token has none, or one that is no int32.
    """
    reached = 0
    for span in answer.node.versions:
        if span.start != reached or span.end <= span.start:
            raise CaptureError("W01", f"token {reached} of call {answer.call.call_id} has no policy version")
        if not 0 <= span.policy_version <= NEWEST:
            said = f"policy version {span.policy_version} of call {answer.call.call_id} is not between 0 and {NEWEST}"
            raise CaptureError("W01", f"{said}; count versions, or name them by seconds")
        reached = span.end
    if reached != len(answer.node.ids):
        raise CaptureError("W01", f"versions of call {answer.call.call_id} end at token {reached} of {len(answer.node.ids)}")
    lengths = [span.end - span.start for span in answer.node.versions]
    return np.repeat(np.asarray([span.policy_version for span in answer.node.versions], np.int32), lengths)
