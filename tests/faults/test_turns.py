"""T04: a turn that begins otherwise at the end of a prompt than in a history splits no conversation of ours."""

from collections.abc import Sequence

import numpy as np

from polar.chat import Message, TextPart, Tool
from polar.specs import Int32Array
from polar.tokens.history import History
from polar.tokens.rendering import LastTurn
from tests.tokens.sessions import Conversation, Session, follow, text_message
from tests.tokens.toy import ToyRenderer, spell

GLUE = spell("<think></think>")


class Gluing(ToyRenderer):
    """A model that is told not to think by an empty thought, which its template leaves out of histories."""

    name = "gluing"

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        return np.concatenate([super().render(messages, tools), np.asarray(GLUE, np.int32)])

    def bridge(self, last: LastTurn, messages: Sequence[Message]) -> Int32Array:
        return np.concatenate([super().bridge(last, messages), np.asarray(GLUE, np.int32)])


def test_glue_before_a_reply_splits_no_conversation() -> None:
    session, talk = Session(history=History(Gluing())), Conversation([text_message("user", "u")])
    for turn in range(4):
        follow(talk, session.ask(talk, Message("assistant", (TextPart(f"reply {turn}"),))))
    assert [call.fork_reason for call in session.calls] == [""] * 4
    for before, after in zip(session.answers, session.answers[1:], strict=False):
        stored = before.prompt + before.sampled
        assert after.prompt[: len(stored)] == stored
        assert after.prompt[-len(GLUE) :] == GLUE
    anew = Gluing().render(talk.messages, ()).tolist()
    assert anew[: len(session.answers[0].prompt)] != session.answers[0].prompt, "a history that is rendered anew is another"
