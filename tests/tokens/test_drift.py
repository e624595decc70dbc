"""Why an engine's own rendering of a history leaves what is stored: each reason by an example, with and without a decoder."""

from collections.abc import Sequence

import numpy as np
import pytest

from polar.chat import Message, TextPart, ToolCall
from polar.specs import Int32Array
from polar.tokens.drift import CODES, DriftReason, Turn, doubles_stop, drift_reason
from polar.tokens.tree import common_prefix

START, END, THINK, THOUGHT = 1, 2, 3, 4
MARKS = {START: "<s>", END: "<e>", THINK: "<think>", THOUGHT: "</think>"}
PAIR = 1 << 16  # one id for two letters


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def pair(two: str) -> int:
    return PAIR * ord(two[0]) + ord(two[1])


def decode(ids: Sequence[int]) -> str:
    return "".join(MARKS.get(token) or (chr(token) if token < PAIR else chr(token // PAIR) + chr(token % PAIR)) for token in ids)


ASKED = [START, *letters("Hi"), END, START]
SENT = Message("assistant", (TextPart(" Yes. "),), "Hm, so", (ToolCall("c", "sh", '{"a":  1}'),))
CALL = [*letters('sh{"a":  1}')]
REASONED = [THINK, *letters("Hm, so"), THOUGHT]
SAID = [*REASONED, *letters(" Yes. "), *CALL, END]
PLAIN = Message("assistant", (TextPart("Yes."),))


def reason(
    reply: Sequence[int],
    later: Sequence[int],
    *,
    sent: Message = SENT,
    came: Message | None = None,
    stopped: bool = True,
    decoded: bool = True,
    glue: Sequence[int] = (),
) -> DriftReason:
    """Of one reply after `ASKED` and `glue`, in a prompt that goes on with `later` after `ASKED`."""
    stored = np.asarray([*ASKED, *glue, *reply], np.int32)
    new = np.asarray([*ASKED, *later, START, *letters("Next"), END, START], np.int32)
    start = len(ASKED) + len(glue)
    turn = Turn(start, len(stored), stopped, sent, came or sent)
    at = common_prefix(stored, new)
    assert at < len(stored), "no drift at all"
    return drift_reason(stored, new, at, [turn], decode if decoded else None)


def respelled(ids: Sequence[int], old: str, new: str | list[int]) -> list[int]:
    """Some letters of a reply in other ids."""
    place = next(place for place in range(len(ids)) if list(ids[place : place + len(old)]) == letters(old))
    return [*ids[:place], *(letters(new) if isinstance(new, str) else new), *ids[place + len(old) :]]


BY_TEXT: list[tuple[DriftReason, list[int]]] = [
    ("retokenised", respelled(SAID, "Ye", [pair("Ye")])),
    ("retokenised", respelled(SAID, "Hm", [pair("Hm")])),
    ("arguments_respelled", respelled(SAID, ":  1", ":1")),
    ("text_trimmed", respelled(SAID, " Yes. ", "Yes.")),
    ("reasoning_dropped", SAID[len(REASONED) :]),
    ("reasoning_dropped", [THINK, *letters("\n"), THOUGHT, *SAID[len(REASONED) :]]),
    ("stop_trimmed", SAID[:-1]),
    ("drifted", letters("Something else")),
]


@pytest.mark.parametrize(("expected", "later"), BY_TEXT)
def test_with_a_decoder_each_reason_is_told_from_the_others(expected: DriftReason, later: list[int]) -> None:
    assert reason(SAID, later) == expected


@pytest.mark.parametrize("decoded", [True, False])
def test_the_first_difference_is_what_counts(decoded: bool) -> None:
    """Ids that differ first are retokenised, whatever is respelled after them; without a decoder nobody can say so."""
    later = respelled(respelled(SAID, "Ye", [pair("Ye")]), ":  1", ":1")
    assert reason(SAID, later, decoded=decoded) == ("retokenised" if decoded else "drifted")


def test_a_difference_in_a_reply_that_nobody_knows_is_a_drift() -> None:
    stored = np.asarray([*ASKED, *letters("Yes."), END], np.int32)
    assert drift_reason(stored, stored[:-2], len(stored) - 2, [], decode) == "drifted"


def test_half_a_character_is_no_difference_of_text() -> None:
    def halves(ids: Sequence[int]) -> str:
        return decode(ids).replace("Ye", "\u00e9").replace("Y", "\ufffd")

    stored = np.asarray([*ASKED, *letters("Yes."), END], np.int32)
    new = np.asarray([*ASKED, pair("Ye"), *letters("s."), END, START], np.int32)
    turn = Turn(len(ASKED), len(stored), True, PLAIN, PLAIN)
    assert drift_reason(stored, new, len(ASKED), [turn], halves) == "retokenised"


BY_MESSAGE: list[tuple[DriftReason, list[int], Message]] = [
    (
        "arguments_respelled",
        respelled(SAID, ":  1", ":1"),
        Message("assistant", SENT.content, SENT.reasoning, (ToolCall("c", "sh", '{"a":1}'),)),
    ),
    (
        "text_trimmed",
        respelled(SAID, " Yes. ", "Yes."),
        Message("assistant", (TextPart("Yes."),), SENT.reasoning, SENT.tool_calls),
    ),
    ("reasoning_dropped", SAID[len(REASONED) :], Message("assistant", SENT.content, "", SENT.tool_calls)),
    ("drifted", respelled(SAID, ":  1", ":1"), SENT),
]


@pytest.mark.parametrize(("expected", "later", "came"), BY_MESSAGE)
def test_without_a_decoder_only_what_came_back_differently_is_named(
    expected: DriftReason, later: list[int], came: Message
) -> None:
    assert reason(SAID, later, came=came, decoded=False) == expected


@pytest.mark.parametrize("decoded", [True, False])
def test_what_the_prompt_put_before_the_reply_and_history_leaves_out_is_glue(decoded: bool) -> None:
    """T04: the empty thinking block of a model that is told not to think."""
    reply = [*letters("Yes."), END]
    assert reason(reply, reply, sent=PLAIN, glue=[THINK, THOUGHT], decoded=decoded) == "template_glue"
    assert reason(reply, [THINK, THOUGHT, *reply], sent=PLAIN, decoded=decoded) == "template_glue"


@pytest.mark.parametrize("decoded", [True, False])
def test_reasoning_that_the_prompt_opened_is_dropped_with_its_opening(decoded: bool) -> None:
    reply = [*letters("Hm, so"), THOUGHT, *letters("Yes."), END]
    sent = Message("assistant", (TextPart("Yes."),), "Hm, so")
    assert reason(reply, [*letters("Yes."), END], sent=sent, glue=[THINK], decoded=decoded) == "reasoning_dropped"


@pytest.mark.parametrize("decoded", [True, False])
def test_a_turn_that_was_cut_is_not_said_to_have_lost_its_end(decoded: bool) -> None:
    """Its last token is a word: the next prompt spells it otherwise."""
    reply, later = letters("Yes"), [*letters("Ye"), pair("s."), END]
    found = reason(reply, later, sent=PLAIN, stopped=False, decoded=decoded)
    assert found == ("retokenised" if decoded else "drifted")


def test_an_end_that_is_written_twice_between_turns() -> None:
    """T06."""
    first, second = [*letters("One"), END], [*letters("Two"), END]
    stored = np.asarray([*ASKED, *first, START, *second], np.int32)
    new = np.asarray([*ASKED, *first, END, START, *second, END, START], np.int32)
    turns = [
        Turn(len(ASKED), len(ASKED) + len(first), True, PLAIN, PLAIN),
        Turn(len(ASKED) + len(first) + 1, len(stored), True, PLAIN, PLAIN),
    ]
    assert drift_reason(stored, new, common_prefix(stored, new), turns) == "stop_doubled"


def test_an_end_that_is_written_once_more_after_all_that_is_stored() -> None:
    def doubled(*new: int) -> bool:
        return doubles_stop(np.asarray([*letters("One"), END, *new], np.int32), 4)

    assert (doubled(END, START), doubled(START), doubled()) == (True, False, False)


def test_a_prompt_that_ends_before_all_that_is_stored_is_a_drift() -> None:
    stored: Int32Array = np.asarray([*ASKED, *SAID], np.int32)
    turn = Turn(len(ASKED), len(stored), True, SENT, None)
    for size in range(len(stored)):
        assert drift_reason(stored, stored[:size], size, [turn], decode) in CODES
        assert drift_reason(stored, stored[:size], size, [turn]) in CODES
