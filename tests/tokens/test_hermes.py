"""A reply is read the same however it arrives, and whatever a model writes, it is read without an error.

Replies are written here as text; where a vocabulary has a tag as an added token, the reply holds its id.
"""

import itertools
import json
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polar.chat import Delta, Message, ReasoningDelta, TextDelta, TextPart, ToolCall
from polar.tokens.chatml import ChatMLRenderer
from polar.tokens.hermes import MAX_DEPTH, TAGS, HermesParser
from polar.tokens.rendering import ParsedReply
from polar.tokens.tokenizer import Tokenizer
from tests.tokens.toy import left

Sampled = Callable[[str], Sequence[int]]
Read = Callable[[str], ParsedReply]

FAILED = ("tool_parse_error",)
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
READ_A = ("read", '{"path": "a"}')


@pytest.fixture
def read(renderer: ChatMLRenderer, sampled: Sampled) -> Read:
    """Parse a reply that ends with its stop token."""

    def parse(reply: str) -> ParsedReply:
        return stream(renderer, [sampled(reply + "<|im_end|>")])[1]

    return parse


def stream(renderer: ChatMLRenderer, chunks: Sequence[Sequence[int]]) -> tuple[list[Delta], ParsedReply]:
    """All deltas and the reply."""
    parser = renderer.parser()
    deltas = [delta for chunk in chunks for delta in parser.push(chunk)]
    rest, reply = parser.finish()
    return deltas + rest, reply


def joined(deltas: Sequence[Delta]) -> tuple[str, str]:
    """Text and reasoning."""
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    return text, "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))


# What a reply says


@pytest.mark.parametrize(
    "text", ["Hello!", "a  b\n\n\n c", "1 < 2 <b> </b> <tool", "\n  leading", "é 你好 👩‍👩‍👧", "<|im_start|>user"]
)
def test_text_is_verbatim(text: str, read: Read) -> None:
    assert read(text) == ParsedReply(text, "", ())


def test_an_empty_reply_says_nothing(renderer: ChatMLRenderer, read: Read) -> None:
    """T15."""
    assert read("") == ParsedReply("", "", ())
    assert stream(renderer, []) == ([], ParsedReply("", "", ()))


def test_whitespace_at_the_end_is_layout(read: Read) -> None:
    assert read("Hello!\n\t \r\n") == ParsedReply("Hello!", "", ())
    assert read(" \n") == ParsedReply("", "", ())


def test_a_call_is_read_with_its_arguments_as_written(read: Read) -> None:
    arguments = '{ "b":1,\n  "a" : [1.0, "\\u00e9 é"], "b": 2 }'
    reply = f'<tool_call>\n{{"arguments":  {arguments} , "name": "do it", "id": 7}}\n</tool_call>'
    assert read(reply) == ParsedReply("", "", (("do it", arguments),))


def test_arguments_in_a_string_are_what_the_string_holds(read: Read) -> None:
    reply = '<tool_call>{"name": "read", "arguments": "{\\"path\\":  \\"a\\"}"}</tool_call>'
    assert read(reply).tool_calls == (("read", '{"path":  "a"}'),)


def test_several_calls_with_text_between(read: Read) -> None:
    assert read(f"First.\n{CALL}\n{CALL}\n\nThen this:\n{CALL}\n Done.\n") == ParsedReply(
        "First.Then this:Done.", "", (READ_A,) * 3
    )


def test_whitespace_that_touches_a_call_is_layout(read: Read) -> None:
    assert read(f"\n One  two. \n\n{CALL}\r\n\t Three.") == ParsedReply("\n One  two.Three.", "", (READ_A,))
    assert read(f" \n{CALL}") == ParsedReply("", "", (READ_A,))


def test_a_tag_within_an_arguments_string_is_part_of_it(read: Read) -> None:
    arguments = '{"text": "</tool_call> <tool_call>{} <think> </tool_call>"}'
    assert read(f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call>ok') == ParsedReply(
        "ok", "", (("write", arguments),)
    )


def test_reasoning_opens_the_reply(read: Read) -> None:
    assert read("<think>\nLet me  see.\n\nYes.\n</think>\n\nHello!") == ParsedReply("Hello!", "Let me  see.\n\nYes.", ())
    assert read(f"\n<think>Hm</think>{CALL}") == ParsedReply("", "Hm", (READ_A,))
    assert read("<think>\n\n</think>\n\nHello!") == ParsedReply("Hello!", "", ())


def test_reasoning_that_never_ends_goes_to_the_end(read: Read) -> None:
    assert read(f"<think>\nHm {CALL}\n") == ParsedReply("", f"Hm {CALL}", ())


@pytest.mark.parametrize("text", ["Hi <think>no</think>", "a</think>b", "</think>", "</tool_call>"])
def test_reasoning_opens_nowhere_else(text: str, read: Read) -> None:
    assert read(text) == ParsedReply(text, "", ())


def test_reasoning_opens_only_once(read: Read) -> None:
    assert read("<think>a</think><think>b</think>") == ParsedReply("<think>b</think>", "a", ())
    assert read(f"{CALL}<think>b</think>") == ParsedReply("<think>b</think>", "", (READ_A,))


# Calls that are none (T16)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "read a",
        '{"name": "read", "arguments": {"path": "a"}',
        '{"name": "read", "arguments": {"path": "a}}',
        '{"name": "read", "arguments": {"path": "a"}}}',
        '{"name": "read", "arguments": {"path": "a"]}',
        '{"name": "read", "arguments": {"path": "a",}}',
        '{"name": "read", "arguments": {"path": "a"}} please',
        "{'name': 'read', 'arguments': {}}",
        '{"arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": "read"}',
        '{"name": "read", "arguments": null}',
        '{"name": "read", "arguments": [1]}',
        '{"name": "read", "arguments": "path"}',
        '{"name": "read", "arguments": "{broken"}',
        '{"name": "read", "arguments": {"size": NaN}}',
        '{"name": "read", "arguments": {"path": "\\q"}}',
        '{"name": "read", "arguments": {"path": "\\ud800"}}',
        '{"name": "read", "arguments": {"path": "line\nend"}}',
        '[{"name": "read", "arguments": {}}]',
        "{}",
        "{{}}",
    ],
)
def test_what_is_no_call_goes_out_as_the_model_wrote_it(body: str, read: Read) -> None:
    reply = f"Look: \n<tool_call>\n{body}\n</tool_call>  \nDone."
    assert read(reply) == ParsedReply(reply, "", (), FAILED)


@pytest.mark.parametrize("reply", ["<tool_call>", '<tool_call>\n{"name"', CALL.removesuffix("</tool_call>").strip(), CALL[:-1]])
def test_a_call_that_never_ends_is_text(reply: str, read: Read) -> None:
    assert read(reply) == ParsedReply(reply, "", (), FAILED)


def test_a_good_call_after_a_broken_one_counts(read: Read) -> None:
    broken = '<tool_call>\n{"name": "read\n</tool_call>'
    assert read(f"{broken}\n{CALL}") == ParsedReply(broken, "", (READ_A,), FAILED)


def test_a_call_that_was_opened_twice_counts_once(read: Read) -> None:
    assert read(f"<tool_call>\n{CALL}") == ParsedReply("<tool_call>", "", (READ_A,), FAILED)


def test_nesting_has_a_bound(read: Read) -> None:
    def nested(depth: int) -> str:
        return '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"

    in_bounds, out_of_bounds = nested(MAX_DEPTH - 1), nested(MAX_DEPTH)
    assert read(f'<tool_call>{{"name": "f", "arguments": {in_bounds}}}</tool_call>').tool_calls == (("f", in_bounds),)
    assert read(f'<tool_call>{{"name": "f", "arguments": {out_of_bounds}}}</tool_call>').findings == FAILED
    in_string = json.dumps(nested(100_000))
    assert read(f'<tool_call>{{"name": "f", "arguments": {in_string}}}</tool_call>').findings == FAILED


# Stop ids and other control tokens


def test_the_last_stop_id_is_not_text(renderer: ChatMLRenderer, sampled: Sampled) -> None:
    assert stream(renderer, [sampled("Hi<|im_end|>")])[1].text == "Hi"
    assert stream(renderer, [sampled("Hi"), sampled("<|im_end|>")])[1].text == "Hi"


def test_a_reply_that_was_cut_has_no_stop_id(renderer: ChatMLRenderer, sampled: Sampled) -> None:
    assert stream(renderer, [sampled("Hi")])[1].text == "Hi"


def test_every_stop_id_counts(tokenizer: Tokenizer, sampled: Sampled) -> None:
    (eos,) = sampled("<|endoftext|>")
    parser = HermesParser(tokenizer, (eos,))
    parser.push(sampled("Hi<|endoftext|>"))
    assert parser.finish()[1].text == "Hi"


def test_control_tokens_elsewhere_are_spelled_out(renderer: ChatMLRenderer, sampled: Sampled) -> None:
    reply = "a<|im_start|>user\nb<|im_end|>\nc<|im_end|><|im_end|>"
    for chunks in ([sampled(reply)], [[id] for id in sampled(reply)]):
        assert stream(renderer, chunks)[1].text == reply.removesuffix("<|im_end|>")


# Streaming


def test_text_streams_as_it_comes(renderer: ChatMLRenderer, sampled: Sampled) -> None:
    parser = renderer.parser()
    assert parser.push(sampled("Hello")) == [TextDelta("Hello")]
    assert parser.push(sampled(" you")) == [TextDelta(" you")]
    assert parser.push([]) == []
    assert parser.finish() == ([], ParsedReply("Hello you", "", ()))


def test_reasoning_streams_as_it_comes_and_before_text(renderer: ChatMLRenderer, sampled: Sampled) -> None:
    parser = renderer.parser()
    assert parser.push(sampled("<think>\nHm")) == [ReasoningDelta("Hm")]
    assert parser.push(sampled(" yes\n</think>\n\nHi")) == [ReasoningDelta(" yes"), TextDelta("Hi")]


def test_only_what_may_be_layout_or_a_tag_is_held_back(renderer: ChatMLRenderer, sampled: Sampled) -> None:
    parser = renderer.parser()
    assert parser.push(sampled("a \n")) == [TextDelta("a")]
    assert parser.push(sampled("b <to")) == [TextDelta(" \nb")]
    assert parser.push(sampled("t")) == [TextDelta(" <tot")]


def test_a_call_shows_only_at_the_end(renderer: ChatMLRenderer, sampled: Sampled) -> None:
    parser = renderer.parser()
    assert parser.push(sampled(f"Ok.\n{CALL}\n")) == [TextDelta("Ok.")]
    assert parser.finish() == ([], ParsedReply("Ok.", "", (READ_A,)))


def test_a_broken_call_shows_as_soon_as_it_is_known_to_be_none(renderer: ChatMLRenderer, sampled: Sampled) -> None:
    parser = renderer.parser()
    assert parser.push(sampled("<tool_call>\n")) == []
    assert parser.push(sampled("read")) == [TextDelta("<tool_call>\nread")]


# Whatever a model writes

PIECES = [
    "<tool_",
    "call>",
    "</",
    "<",
    "\n",
    " ",
    "\n\n",
    '"',
    "\\",
    "{",
    "}",
    "[",
    '{"name": "f", "arguments": {}}',
    '"arguments": ',
]
OTHERS = ["word", "é", "👩", "<|im_start|>", "<|im_end|>", "\ufffd", CALL]
fragments = st.sampled_from([*TAGS, *PIECES, *OTHERS])
soups = st.lists(fragments, max_size=25).map("".join)


def ids_of(data: st.DataObject, sampled: Sampled, added: Mapping[str, int]) -> Sequence[int]:
    """A plausible mess of tags, JSON and text; or any ids at all, broken characters and unknown ids included."""
    if data.draw(st.booleans(), label="from text"):
        return sampled(data.draw(soups, label="reply"))
    return data.draw(st.lists(st.sampled_from(sorted(added.values())) | st.integers(-1, 152_500), max_size=40), label="ids")


@given(data=st.data())
def test_any_split_gives_the_same_reply_and_deltas(
    renderer: ChatMLRenderer, sampled: Sampled, added: Mapping[str, int], data: st.DataObject
) -> None:
    ids = ids_of(data, sampled, added)
    whole = stream(renderer, [ids])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids))), label="cuts"))
    parts = stream(renderer, [ids[start:end] for start, end in itertools.pairwise([0, *cuts, len(ids)])])
    singles = stream(renderer, [[id] for id in ids])
    assert whole[1] == parts[1] == singles[1]
    for deltas, reply in (whole, parts, singles):
        assert joined(deltas) == (reply.text, reply.reasoning)
        assert all(delta.text for delta in deltas)


@given(data=st.data())
def test_nothing_but_layout_and_calls_is_lost(
    renderer: ChatMLRenderer, sampled: Sampled, added: Mapping[str, int], data: st.DataObject
) -> None:
    """Without a call or reasoning, text is the decoded reply up to the whitespace at its end."""
    ids = ids_of(data, sampled, added)
    reply = stream(renderer, [ids])[1]
    if not reply.tool_calls and not renderer.decode(ids).lstrip(" \t\r\n").startswith("<think>"):
        spelled = ids[:-1] if len(ids) and ids[-1] in renderer.stop_ids else ids
        assert reply.text == renderer.decode(spelled).rstrip(" \t\r\n")


@given(text=st.text(alphabet="aé你👩\n<"))
def test_a_character_is_never_shown_in_halves(renderer: ChatMLRenderer, sampled: Sampled, text: str) -> None:
    deltas, _ = stream(renderer, [[id] for id in sampled(text)])
    assert not any("\ufffd" in delta.text for delta in deltas)


words = st.text(st.characters(max_codepoint=0x2FFFF, exclude_categories=("Cs", "Cc"), include_characters="\n\t")).map(
    lambda text: unicodedata.normalize("NFC", text).strip(" \t\r\n")
)
objects = st.dictionaries(
    words, st.recursive(st.none() | st.booleans() | st.integers() | words, lambda inner: st.lists(inner, max_size=3))
)
written = st.builds(
    lambda value, spaced: json.dumps(value, ensure_ascii=spaced, separators=None if spaced else (",", ":")),
    objects,
    st.booleans(),
)


untagged = words.filter(lambda text: not any(tag in text for tag in TAGS))


@given(text=untagged, reasoning=untagged, calls=st.lists(st.tuples(words.filter(bool), written), max_size=3))
@example(text="", reasoning="", calls=[("f", '{"a":"</tool_call>"}')])
def test_what_is_rendered_is_read_back(renderer: ChatMLRenderer, text: str, reasoning: str, calls: list[tuple[str, str]]) -> None:
    message = Message(
        "assistant", (TextPart(text),), reasoning, tuple(ToolCall("", name, arguments) for name, arguments in calls)
    )
    prompt, through, bridge = renderer.render([], ()), renderer.render([message], ()), renderer.bridge(left(True), ())
    reply = through[len(prompt) : len(through) - len(bridge)].tolist()
    assert stream(renderer, [reply])[1] == ParsedReply(text, reasoning, tuple(calls))


ENDLESS = [
    *("<tool_call", "<tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>{"," "', '<tool_call>{"a":"\\"', "<", "<think>"),
    *("\n", "\\", "[", '{"a":', '<tool_call>{"</tool_call>', '<tool_call>{"name":"f","arguments":{}}</tool_call>'),
]


@pytest.mark.parametrize("fragment", ENDLESS)
@pytest.mark.parametrize("opening", ["", '<tool_call>{"name": "f", "arguments": ', '<tool_call>{"'])
def test_a_megabyte_of_anything_is_read_in_no_time(
    fragment: str, opening: str, renderer: ChatMLRenderer, sampled: Sampled
) -> None:
    """Under a second; a reader that starts again at every tag needs hours."""
    ids = [*sampled(opening), *(list(sampled(fragment * 100)) * (10_000 // len(fragment)))]
    assert seconds_to_read(renderer, [ids]) < 10


@pytest.mark.parametrize("fragment", ["word ", "\n", '<tool_call>{"'])
@pytest.mark.parametrize("opening", ["", "<think>", '<tool_call>{"name": "f", "arguments": {"text": "'])
def test_a_token_costs_the_same_however_long_the_reply(
    fragment: str, opening: str, renderer: ChatMLRenderer, sampled: Sampled
) -> None:
    """A few microseconds each; a reader that goes over the reply again for every token needs an hour."""
    ids = [*sampled(opening), *itertools.islice(itertools.cycle(sampled(fragment * 100)), 200_000)]
    assert seconds_to_read(renderer, [[id] for id in ids]) < 2 + len(ids) * 25e-6


def seconds_to_read(renderer: ChatMLRenderer, chunks: Sequence[Sequence[int]]) -> float:
    began = time.process_time()
    stream(renderer, chunks)
    return time.process_time() - began
