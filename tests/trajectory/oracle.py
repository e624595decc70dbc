"""Random sessions of plain lists, and what must become of them, said slowly: a trace is a list, a comparison is of whole lists.

Every token of a session has an id of its own, but for what calls share; so whatever begins alike is the same, and lists say all
that a tree could. (Sessions in which different calls say the same are in `tests.tokens.sessions`.)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from hypothesis import strategies as st

from polar.chat import FinishReason, Message, RequestedSampling
from polar.specs import CallKind, TrainingPolicy, VersionSpan
from polar.tokens.records import Call, CallStatus, ChoiceRecord, Position, Untrained
from polar.tokens.tree import EMPTY, TokenTree
from polar.trajectory.builders import Captured

SYSTEM = [1, 2, 3, 4, 5]
KINDS: tuple[CallKind, ...] = ("agent", "agent", "agent", "subagent", "subagent", "auxiliary", "compaction")
treatments = st.sampled_from(["exclude", "train"])
policies = st.builds(TrainingPolicy, treatments, treatments, treatments, treatments)


@dataclass
class Told:
    """One answer: its ids after its call's prompt, with log-probabilities and versions."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: FinishReason


@dataclass
class Asked:
    """One call; `needs` are the calls of whose answers its prompt holds tokens."""

    ordinal: int
    kind: CallKind
    prompt: list[int]
    messages: list[str]
    needs: list[int]
    answers: list[Told]
    status: CallStatus = "ok"
    delivered: bool = True
    constrained: bool = False
    untrained: Untrained = ""
    replaces: int | None = None
    tail: int = 0

    @property
    def call_id(self) -> str:
        return f"c{self.ordinal}"

    @property
    def sampled(self) -> int:
        return sum(len(answer.ids) for answer in self.answers) + self.tail


@st.composite
def sessions(draw: st.DrawFn, most: int = 9) -> list[Asked]:
    """Calls that go on from an answer, ask again, leave history in the middle, begin anew, hang up, get cut, answer n times."""
    fresh = count(100)
    calls: list[Asked] = []
    calm = draw(st.booleans())  # nothing fails, so that histories grow deep
    for ordinal in range(draw(st.integers(1, most))):
        prompt, messages, needs = _prompt(draw, calls, fresh)
        cut = draw(st.booleans())
        answers = [_answer(draw, fresh, cut) for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3])))]
        asked = Asked(ordinal, draw(st.sampled_from(KINDS)), prompt, messages, needs, answers)
        if not calm:
            asked.status = draw(st.sampled_from(["ok", "ok", "ok", "ok", "aborted", "failed"]))
            asked.delivered = asked.status == "ok" and draw(st.sampled_from([True, True, False]))
            asked.constrained = draw(st.sampled_from([False] * 6 + [True]))
            asked.untrained = draw(st.sampled_from([""] * 8 + ["external", "unproven"]))
            asked.replaces = draw(st.sampled_from([None, None, None, *range(ordinal)]))
        asked.tail = draw(st.sampled_from([0, 0, 2]))
        calls.append(asked)
    return calls


def _prompt(draw: st.DrawFn, calls: Sequence[Asked], fresh: Iterable[int]) -> tuple[list[int], list[str], list[int]]:
    new = [next(iter(fresh)) for _ in range(draw(st.integers(1, 3)))]
    said = f"m{new[0]}"
    before = draw(st.sampled_from([None, *calls, *list(calls[-2:]) * 3]))
    how = draw(st.sampled_from(["follow", "follow", "follow", "again", "again", "leave", "reworded"])) if before else "begin"
    if before is None or how == "reworded" or (how == "follow" and before.status == "failed"):
        known = before.messages if before is not None and how == "reworded" else []
        return SYSTEM[: draw(st.integers(1, len(SYSTEM)))] + new, [*known, said], []
    if how == "again":
        return list(before.prompt), [*before.messages, *draw(st.sampled_from([[], [said]]))], list(before.needs)
    choice = draw(st.integers(0, len(before.answers) - 1)) if before.status != "failed" else 0
    whole = before.prompt + (before.answers[choice].ids if before.status != "failed" else [])
    if how == "follow":
        return whole + new, [*before.messages, f"a{before.ordinal}.{choice}", said], [*before.needs, before.ordinal]
    kept = whole[: draw(st.integers(1, len(whole)))]
    needs = [*before.needs, *([before.ordinal] if len(kept) > len(before.prompt) else [])]
    held = [
        other for other in needs if any(kept[len(calls[other].prompt) :][:1] == told.ids[:1] for told in calls[other].answers)
    ]
    return kept + new, [*before.messages[: draw(st.integers(0, len(before.messages)))], said], held


def _answer(draw: st.DrawFn, fresh: Iterable[int], cut: bool) -> Told:
    ids = [next(iter(fresh)) for _ in range(draw(st.integers(1, 4)))]
    versions = sorted(draw(st.lists(st.integers(1, 3), min_size=len(ids), max_size=len(ids))))
    return Told(ids, [-token / 64 for token in ids], versions, "length" if cut else "stop")


def captured(calls: Sequence[Asked], order: Sequence[int], whole: Sequence[bool] = ()) -> Captured:
    """The session as it is stored when its calls come into the tree in `order`.

    Args:
        whole: of each call, whether its prompt is put into the tree from the root, or behind what it goes on from.
    """
    tree, records, ends = TokenTree(), dict[int, Call](), dict[tuple[int, ...], Position]()
    for ordinal in order:
        asked = calls[ordinal]
        start = (
            ()
            if not whole or whole[ordinal]
            else max((held for held in ends if _begins(asked.prompt, held)), key=len, default=())
        )
        place = tree.add_context(ends.get(start, EMPTY), np.asarray(asked.prompt[len(start) :], np.int32), asked.call_id)
        choices: list[ChoiceRecord] = []
        for number, told in enumerate(asked.answers if asked.status != "failed" else []):
            logprobs = np.asarray(told.logprobs, np.float32)
            spans = tuple(VersionSpan(at, at + 1, version) for at, version in enumerate(told.versions))
            node = tree.add_sampled(place, np.asarray(told.ids, np.int32), logprobs, spans, asked.call_id, number)
            ends[*asked.prompt, *told.ids] = tree.end(node.node_id)
            finish = told.finish if asked.status == "ok" else "abort"
            choices.append(ChoiceRecord(node.node_id, finish, Message("assistant")))
        records[ordinal] = _record(asked, place, tuple(choices))
    hashes = {text for asked in calls for text in asked.messages}
    return Captured([records[n] for n in range(len(calls))], tree.nodes, dict.fromkeys(hashes, Message("user")), {"": ()})


def _begins(whole: Sequence[int], held: Sequence[int]) -> bool:
    return list(whole[: len(held)]) == list(held)


def _record(asked: Asked, place: Position, choices: tuple[ChoiceRecord, ...]) -> Call:
    return Call(
        call_id=asked.call_id,
        session_id="s1",
        ordinal=asked.ordinal,
        dialect="toy",
        model="policy",
        engine="toy",
        kind=asked.kind,
        status=asked.status,
        prompt=place,
        prompt_tokens=len(asked.prompt),
        prompt_hash="",
        request_hash="",
        message_hashes=tuple(asked.messages),
        tools_hash="",
        choices=choices,
        logprobs_mode="raw",
        chain="",
        requested=RequestedSampling(),
        resolved={"temperature": 1.0, "top_p": 1.0, "top_k": 0.0},
        sampled=asked.sampled,
        replaces=f"c{asked.replaces}" if asked.replaces is not None else "",
        delivered=asked.delivered,
        constrained=asked.constrained,
        untrained=asked.untrained,
        tail=asked.tail,
    )


# What must become of them


def reasons(calls: Sequence[Asked], policy: TrainingPolicy) -> dict[int, str]:
    """Why a call is not trained, by ordinal."""
    return {asked.ordinal: why for asked in calls if (why := _reason(asked, calls, policy))}


def _reason(asked: Asked, calls: Sequence[Asked], policy: TrainingPolicy) -> str:
    later = calls[asked.ordinal + 1 :]
    wholes = [asked.prompt + told.ids for told in asked.answers]
    kept = asked.status != "failed" and any(_begins(other.prompt, whole) for other in later for whole in wholes)
    cut = asked.status == "ok" and any(told.finish == "length" for told in asked.answers)
    alike = [other for other in later if other.kind == asked.kind]
    again = any(_begins(other.prompt, asked.prompt) or other.messages[: len(asked.messages)] == asked.messages for other in alike)
    replaced = any(other.replaces == asked.ordinal for other in calls) or (cut and again and not kept)
    why = {
        asked.untrained or "untrained": bool(asked.untrained),
        "untrusted": asked.status == "failed",
        "superseded": replaced and policy.superseded == "exclude",
        "aborted": asked.status == "aborted" and policy.aborted == "exclude",
        "auxiliary": asked.kind == "auxiliary" and policy.auxiliary == "exclude",
        "constrained": asked.constrained,
        "truncated": cut and policy.truncated == "exclude",
        "undelivered": asked.status == "ok" and not asked.delivered and not kept,
    }
    return next((name for name, holds in why.items() if holds), "")


@dataclass
class Expected:
    """A trace as lists; `mask`, `logprobs` and `versions` are of all its ids."""

    calls: list[int]
    prompt: int
    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    parent: int | None = None


@dataclass(eq=False)
class _Trained:
    asked: Asked
    choice: int
    parent: "_Trained | None" = None
    clean: bool = False
    heirs: "list[_Trained]" = field(default_factory=list)

    @property
    def told(self) -> Told:
        return self.asked.answers[self.choice]

    @property
    def whole(self) -> list[int]:
        return self.asked.prompt + self.told.ids

    @property
    def below(self) -> int:
        return 1 + sum(heir.below for heir in self.heirs)


def traces(calls: Sequence[Asked], policy: TrainingPolicy, *, merged: bool) -> list[Expected]:
    """The traces of a session, one for each answer, or one for each chain of answers."""
    out = reasons(calls, policy)
    trained = [_Trained(asked, choice) for asked in calls if asked.ordinal not in out for choice in range(len(asked.answers))]
    for answer in trained:
        touched = [other for other in trained if _common(answer.asked.prompt, other.whole) > len(other.asked.prompt)]
        answer.parent = max(touched, key=lambda other: len(other.asked.prompt), default=None)
        answer.clean = answer.parent is not None and _begins(answer.asked.prompt, answer.parent.whole)
        if answer.parent is not None and answer.clean:
            answer.parent.heirs.append(answer)
    chains: list[list[_Trained]] = []
    for answer in trained:
        if not merged or answer.parent is None or not answer.clean or _heir(answer.parent) is not answer:
            chains.append([answer])
            while merged and chains[-1][-1].heirs:
                chains[-1].append(_heir(chains[-1][-1]))
    home = {answer: index for index, chain in enumerate(chains) for answer in chain}
    return [_expected(chain, home[chain[0].parent] if chain[0].parent else None) for chain in chains]


def _heir(answer: _Trained) -> _Trained:
    return max(answer.heirs, key=lambda heir: (heir.below, -heir.asked.ordinal, -heir.choice))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _expected(chain: Sequence[_Trained], parent: int | None) -> Expected:
    ids = chain[-1].whole
    mask, logprobs, versions = [0] * len(ids), [0.0] * len(ids), [-1] * len(ids)
    for answer in chain:
        here = slice(len(answer.asked.prompt), len(answer.whole))
        mask[here], logprobs[here], versions[here] = [1] * len(answer.told.ids), answer.told.logprobs, answer.told.versions
    return Expected([answer.asked.ordinal for answer in chain], len(chain[0].asked.prompt), ids, mask, logprobs, versions, parent)
