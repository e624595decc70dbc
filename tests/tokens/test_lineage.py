"""Which earlier reply a history continues, by examples. `test_history.py` does the same with random sessions."""

import pytest
from msgspec import Raw

from polar.chat import Message, TextPart, Tool, ToolCall
from polar.ids import tool_call_id
from polar.tokens.lineage import Continuation, Lineage, Reply, Root, chain_values, link, system_text, tools_root

FIRST, SECOND = "c0aaaaaaaa", "c1bbbbbbbb"
BASH = Tool("bash", "Run it.", Raw(b'{"type":"object"}'))
USER = Message("user", (TextPart("Do it."),))
NEXT = Message("user", (TextPart("Go on."),))


def says(text: str) -> Message:
    return Message("assistant", (TextPart(text),))


def calls(arguments: str, call_id: str = FIRST, name: str = "bash", text: str = "") -> Message:
    return Message("assistant", (TextPart(text),) if text else (), "", (ToolCall(tool_call_id(call_id, 0, 0), name, arguments),))


def known(*replies: tuple[str, Message], prompt: tuple[Message, ...] = (USER,), tools: tuple[Tool, ...] = (BASH,)) -> Lineage:
    """A session in which each of `replies` answered `prompt`."""
    lineage, root = Lineage(), tools_root(tools)
    chain = chain_values(root, prompt)[-1]
    for call_id, message in replies:
        lineage.register(Reply(call_id, 0), chain, message, Root(root, system_text(prompt)))
    return lineage


def find(lineage: Lineage, *history: Message, tools: tuple[Tool, ...] = (BASH,)) -> Continuation:
    return lineage.find(chain_values(tools_root(tools), history), history)


def test_a_history_that_holds_a_reply_continues_it() -> None:
    lineage = known((FIRST, says("Done.")))
    assert find(lineage, USER, says("Done."), NEXT) == Continuation(Reply(FIRST, 0), 2)
    assert find(lineage, USER, says("Done.")) == Continuation(Reply(FIRST, 0), 2)


def test_a_first_request_continues_nothing_and_is_no_fork() -> None:
    assert find(Lineage(), USER) == Continuation(None)
    assert find(known((FIRST, says("Done."))), USER, NEXT) == Continuation(None)
    assert find(Lineage()) == Continuation(None)


SAME = [
    ('{"a": 1, "b": 2}', '{"b":2,"a":1}'),
    ('{"a": 1.0}', '{"a":1}'),
    ('{"a": [1.0, {"b": -0.0}]}', '{"a":[1,{"b":0}]}'),
    ('{"a": 1e2}', '{"a":100}'),
    ('{"a": "\\u00e9\\/"}', '{"a":"é/"}'),
    ('{"a": "\\ud83d\\ude00"}', '{"a":"😀"}'),
    ('{"a":1,"a":2}', '{"a":2}'),
    ('  {"a" :\n1}\t', '{"a":1}'),
    ("not json", "not json"),
    ("", ""),
]
OTHER = [
    ('{"a": 1}', '{"a": 2}'),
    ('{"a": 1}', '{"a": "1"}'),
    ('{"a": 1}', '{"a": true}'),
    ('{"a": 0}', '{"a": false}'),
    ('{"a": 0}', '{"a": null}'),
    ('{"a": null}', "{}"),
    ('{"a": []}', '{"a": {}}'),
    ('{"a": [1, 2]}', '{"a": [2, 1]}'),
    ("{}", ""),
    ("{}", "not json"),
    ("not json", "not json "),
    ('{"a": 12345678901234567890123}', '{"a": 12345678901234567890124}'),
    ('{"a": 9007199254740993}', '{"a": 9007199254740992}'),
    ('{"a": 1e400}', '{"a": 2e400}'),
    ('{"a": 1e400}', '{"a": null}'),
    ('{"a": "\\ud800"}', '{"a": "\\ud801"}'),
    ('{"a": "\\ud800"}', '{"a": "\ufffd"}'),
    ("[" * 5000, "[" * 4999),
    ('{"a": 0.1}', '{"a": 0.10000000000000002}'),
]


@pytest.mark.parametrize(("sent", "came_back"), SAME)
def test_arguments_may_be_spelled_otherwise(sent: str, came_back: str) -> None:
    assert find(known((FIRST, calls(sent))), USER, calls(came_back)).reply == Reply(FIRST, 0)
    assert find(known((FIRST, calls(came_back))), USER, calls(sent)).reply == Reply(FIRST, 0)


@pytest.mark.parametrize(("sent", "came_back"), OTHER)
def test_arguments_that_mean_something_else_fork(sent: str, came_back: str) -> None:
    for one, other in ((sent, came_back), (came_back, sent)):
        assert find(known((FIRST, calls(one))), USER, calls(other)) == Continuation(None, 0, "history_rewritten", FIRST)


def test_reasoning_and_the_cut_of_parts_do_not_matter() -> None:
    lineage = known((FIRST, says("Done.")))
    parts = Message("assistant", (TextPart("Do"), TextPart(""), TextPart("ne.")), "It was never said.")
    assert find(lineage, USER, parts).reply == Reply(FIRST, 0)


@pytest.mark.parametrize(
    "history",
    [
        (USER, says("Done")),
        (USER, says("")),
        (NEXT, says("Done.")),
        (USER, NEXT, says("Done.")),
        (says("Done."),),
        (Message("tool", USER.content), says("Done.")),
        (USER, calls("{}", SECOND, text="Done.")),
        (USER, says("Done."), NEXT, says("Never said.")),
    ],
)
def test_a_history_that_says_something_else_forks(history: tuple[Message, ...]) -> None:
    assert find(known((FIRST, says("Done."))), *history) == Continuation(None, 0, "history_rewritten", "")


def test_calls_are_compared_in_their_order_and_by_name() -> None:
    one, other = ToolCall("", "bash", '{"a":1}'), ToolCall("", "bash", '{"a":2}')
    lineage = known((FIRST, Message("assistant", (), "", (one, other))))
    assert find(lineage, USER, Message("assistant", (), "", (one, other))).reply == Reply(FIRST, 0)
    assert find(lineage, USER, Message("assistant", (), "", (other, one))).reply is None
    assert find(lineage, USER, Message("assistant", (), "", (one,))).reply is None
    renamed = ToolCall("", "zsh", '{"a":1}')
    assert find(lineage, USER, Message("assistant", (), "", (renamed, other))).reply is None


def test_replies_of_one_text_are_ambiguous_and_fork() -> None:
    lineage = known((FIRST, says("Done.")), (SECOND, says("Done.")))
    assert find(lineage, USER, says("Done."), NEXT) == Continuation(None, 0, "ambiguous", "")


def test_an_id_of_ours_settles_which_of_two_equal_replies_is_meant() -> None:
    lineage = known((FIRST, calls("{}", FIRST)), (SECOND, calls("{}", SECOND)))
    assert find(lineage, USER, calls("{}", SECOND)).reply == Reply(SECOND, 0)
    assert find(lineage, USER, calls("{}", FIRST)).reply == Reply(FIRST, 0)


def test_without_our_ids_equal_calls_stay_ambiguous() -> None:
    lineage = known((FIRST, calls("{}", FIRST)), (SECOND, calls("{}", SECOND)))
    foreign = Message("assistant", (), "", (ToolCall("toolu_01", "bash", "{}"),))
    assert find(lineage, USER, foreign) == Continuation(None, 0, "ambiguous", "")


def test_ids_of_two_calls_in_one_message_name_none() -> None:
    both = tuple(ToolCall(tool_call_id(call_id, 0, 0), "bash", "{}") for call_id in (FIRST, SECOND))
    lineage = known((FIRST, Message("assistant", (), "", both)), (SECOND, Message("assistant", (), "", both)))
    assert find(lineage, USER, Message("assistant", (), "", both)).fork_reason == "ambiguous"


def test_an_id_never_widens_what_the_content_says() -> None:
    lineage = known((FIRST, calls('{"a":1}', FIRST)), (SECOND, calls('{"a":2}', SECOND)))
    swapped = calls('{"a":2}', FIRST)
    assert find(lineage, USER, swapped) == Continuation(None, 0, "history_rewritten", FIRST)


def test_an_id_of_another_session_names_nobody_here() -> None:
    assert find(known((FIRST, calls("{}", FIRST))), USER, calls("{}", "c7zzzzzzzz")) == Continuation(
        None, 0, "history_rewritten", ""
    )


def test_an_id_under_another_conversation_forks() -> None:
    lineage = known((FIRST, calls("{}", FIRST)))
    assert find(lineage, NEXT, calls("{}", FIRST)) == Continuation(None, 0, "history_rewritten", FIRST)


@pytest.mark.parametrize(
    "tools",
    [
        (),
        (BASH, BASH),
        (Tool("bash", "Run it!", BASH.parameters),),
        (Tool("bash", "Run it.", Raw(b'{"type": "object"}')),),
        (Tool("bashRun", " it.", BASH.parameters),),
    ],
)
def test_other_tools_fork_by_name(tools: tuple[Tool, ...]) -> None:
    lineage = known((FIRST, calls("{}")))
    assert find(lineage, USER, calls("{}"), tools=tools) == Continuation(None, 0, "tools_changed", FIRST)


def test_another_system_prompt_forks_by_name() -> None:
    system = Message("system", (TextPart("Be brief."),))
    lineage = known((FIRST, calls("{}")), prompt=(system, USER))
    assert find(lineage, system, USER, calls("{}")).reply == Reply(FIRST, 0)
    changed = Message("system", (TextPart("Be verbose."),))
    for history in ((changed, USER), (USER,), (system, system, USER)):
        assert find(lineage, *history, calls("{}")) == Continuation(None, 0, "system_changed", FIRST)


def test_only_the_last_reply_counts() -> None:
    """A reply that we never gave, after one that we gave, hides it: all of it is rendered."""
    lineage = known((FIRST, says("Done.")))
    assert find(lineage, USER, says("Done."), NEXT).reply == Reply(FIRST, 0)
    assert find(lineage, USER, says("Done."), NEXT, says("Injected."), NEXT).reply is None


def test_the_chain_tells_apart_what_a_joined_text_would_not() -> None:
    root = tools_root(())
    one = (Message("user", (TextPart("a"),)), Message("user", (TextPart("b"),)))
    other = (Message("user", (TextPart("ab"),)), Message("user"))
    assert chain_values(root, one)[-1] != chain_values(root, other)[-1]
    assert link(root, Message("user", (TextPart("x"),))) != link(root, Message("system", (TextPart("x"),)))
    assert link(root, calls("{}", name="a", text="b")) != link(root, calls("{}", name="b", text="a"))
