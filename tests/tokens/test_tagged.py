"""Replies of families of others' making are read whole, in linear time, whatever they are."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from msgspec import Raw

from polar.chat import Delta, ReasoningDelta, TextDelta, Tool
from polar.tokens import xmlcalls
from polar.tokens.families import FamilyRenderer
from polar.tokens.rendering import ParsedReply
from polar.tokens.tokenizer import Draft, Tokenizer
from tests.tokens import standins

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "all": {"type": "boolean"}, "count": {"type": "integer"}}}
EDIT = Tool("edit", "Edit a file.", Raw(json.dumps(SCHEMA).encode()))


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return standins.tokenizer(tokenizers.Tokenizer.from_file(str(smollm2_dir / "tokenizer.json")))


@pytest.fixture(scope="module")
def by_name(tokenizer: Tokenizer) -> Callable[[str], FamilyRenderer]:
    return lambda name: standins.renderer(name, tokenizer)


def sampled(tokenizer: Tokenizer, reply: str) -> list[int]:
    draft = Draft(tokenizer)
    draft.scaffold(reply)
    return [int(id) for id in draft.ids()]


def stream(renderer: FamilyRenderer, chunks: Sequence[Sequence[int]]) -> tuple[list[Delta], ParsedReply]:
    parser = renderer.parser([EDIT])
    deltas = [delta for chunk in chunks for delta in parser.push(chunk)]
    rest, parsed = parser.finish()
    return deltas + rest, parsed


def joined(deltas: Sequence[Delta]) -> tuple[str, str]:
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    return text, "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))


FUNCTION = "<tool_call>\n<function=edit>\n<parameter=path>\n{path}\n</parameter>\n</function>\n</tool_call>"


def read(by_name: Callable[[str], FamilyRenderer], tokenizer: Tokenizer, name: str, reply: str) -> ParsedReply:
    return stream(by_name(name), [sampled(tokenizer, reply)])[1]


def test_the_prompt_opens_the_reasoning(by_name: Callable[[str], FamilyRenderer], tokenizer: Tokenizer) -> None:
    parsed = read(by_name, tokenizer, "qwen3.5", "I think.\n</think>\n\nHello<|im_end|>")
    assert (parsed.reasoning, parsed.text) == ("I think.", "Hello")


def test_a_value_keeps_its_whitespace(by_name: Callable[[str], FamilyRenderer], tokenizer: Tokenizer) -> None:
    parsed = read(by_name, tokenizer, "qwen3.5", "</think>\n\n" + FUNCTION.format(path="    indented\n\n") + "<|im_end|>")
    assert json.loads(parsed.tool_calls[0][1]) == {"path": "    indented\n\n"}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("path", "5", "5"),
        ("all", "True", True),
        ("all", "false", False),
        ("count", "3", 3),
        ("count", "many", "many"),
        ("other", '{"a": 1}', {"a": 1}),
    ],
)
def test_types_come_from_the_schema(
    name: str, value: str, expected: object, by_name: Callable[[str], FamilyRenderer], tokenizer: Tokenizer
) -> None:
    for family, call in (
        ("qwen3.5", f"<function=edit>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n"),
        ("glm-5", f"edit<arg_key>{name}</arg_key><arg_value>{value}</arg_value>"),
    ):
        parsed = read(by_name, tokenizer, family, f"</think><tool_call>{call}</tool_call>")
        assert json.loads(parsed.tool_calls[0][1]) == {name: expected}, family


def test_a_call_without_arguments_has_none(by_name: Callable[[str], FamilyRenderer], tokenizer: Tokenizer) -> None:
    for family, call in (("qwen3.5", "<function=edit>\n</function>\n"), ("glm-5", "edit")):
        assert read(by_name, tokenizer, family, f"</think><tool_call>{call}</tool_call>").tool_calls == (("edit", "{}"),)


def test_a_call_ends_reasoning_that_nothing_else_ends(by_name: Callable[[str], FamilyRenderer], tokenizer: Tokenizer) -> None:
    parsed = read(by_name, tokenizer, "qwen3.5", "Hm.\n" + FUNCTION.format(path="a"))
    assert (parsed.reasoning, parsed.tool_calls) == ("Hm.", (("edit", '{"path": "a"}'),))


def test_a_call_within_reasoning_is_reasoning(by_name: Callable[[str], FamilyRenderer], tokenizer: Tokenizer) -> None:
    draft = FUNCTION.format(path="a")
    parsed = read(by_name, tokenizer, "qwen3.5", f"Perhaps {draft} so\n</think>\n\nNo.")
    assert (parsed.reasoning, parsed.text, parsed.tool_calls) == (f"Perhaps {draft} so", "No.", ())


@pytest.mark.parametrize(
    "broken", ["<tool_call>\n<function=edit>\n<parameter=path>\nx", "<tool_call>oops</tool_call>", "<tool_call>"]
)
def test_a_broken_call_goes_out_as_text(broken: str, by_name: Callable[[str], FamilyRenderer], tokenizer: Tokenizer) -> None:
    parsed = read(by_name, tokenizer, "qwen3.5", f"</think>\n\nSo: {broken}")
    assert (parsed.text, parsed.tool_calls, parsed.findings) == (f"So: {broken}", (), ("tool_parse_error",))


def test_text_between_calls_is_kept_and_a_broken_one_hides_no_other(
    by_name: Callable[[str], FamilyRenderer], tokenizer: Tokenizer
) -> None:
    good = FUNCTION.format(path="a")
    parsed = read(by_name, tokenizer, "qwen3.5", f"</think>one\n{good}\ntwo\n<tool_call>bad</tool_call>\n{good}three")
    assert parsed.text == "onetwo<tool_call>bad</tool_call>three"
    assert len(parsed.tool_calls) == 2
    assert parsed.findings == ("tool_parse_error",)


def test_a_block_with_several_calls_hides_no_other(by_name: Callable[[str], FamilyRenderer], tokenizer: Tokenizer) -> None:
    two = "<tool_call>\n" + 2 * "<function=edit>\n<parameter=path>\na\n</parameter>\n</function>\n" + "</tool_call>"
    section = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
    call = "<|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    for family, good, bad in (
        ("qwen3.5", two, "<tool_call>bad</tool_call>"),
        ("qwen3.5", two, "<tool_call>\n<function=edit>\n<parameter=path>\ncut"),
        ("kimi-k2", section.format(call + call), section.format("bad")),
    ):
        for reply, text in ((f"{good}and{bad}", f"and{bad}"), (f"{bad}and{good}", f"{bad}and")):
            if "cut" in reply and reply.endswith(good):
                continue
            parsed = read(by_name, tokenizer, family, f"</think>{reply}" if family == "qwen3.5" else reply)
            assert (parsed.text, len(parsed.tool_calls), parsed.findings) == (text, 2, ("tool_parse_error",))


def test_the_model_says_what_is_a_string_where_its_format_has_a_word_for_it(
    by_name: Callable[[str], FamilyRenderer], tokenizer: Tokenizer
) -> None:
    value = '<｜DSML｜parameter name="{}" string="{}">5</｜DSML｜parameter>\n'
    body = value.format("count", "true") + value.format("path", "false")
    call = f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="edit">\n{body}</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    assert read(by_name, tokenizer, "deepseek-v4", f"</think>{call}").tool_calls == (("edit", '{"count": "5", "path": 5}'),)


@pytest.mark.parametrize("name", ["5", '["edit"]', '"\\ud800"', '""'])
def test_what_is_no_name_is_no_call(name: str, by_name: Callable[[str], FamilyRenderer], tokenizer: Tokenizer) -> None:
    reply = f'{{"name": {name}, "parameters": {{}}}}'
    parsed = read(by_name, tokenizer, "llama-3", reply)
    assert (parsed.text, parsed.tool_calls) == (reply, ())


@pytest.mark.parametrize(
    ("name", "before", "unit"),
    [
        ("deepseek-v4", "</think><｜DSML｜tool_calls>", '<｜DSML｜invoke name="e">\n<｜DSML｜parameter name="x" string="true">'),
        ("deepseek-v3", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>e\n```json\n{"),
        ("kimi-k2", "", "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_calls_section_end|>"),
        ("qwen3.5", "</think><tool_call>", "<function=e><parameter=x>"),
    ],
)
def test_half_a_call_many_times_over_is_read_in_linear_time(
    name: str, before: str, unit: str, by_name: Callable[[str], FamilyRenderer], tokenizer: Tokenizer
) -> None:
    begun = time.process_time()
    assert read(by_name, tokenizer, name, before + unit * 3000).tool_calls == ()
    assert time.process_time() - begun < 5


def test_a_value_of_any_depth_is_read() -> None:
    """Between what a parser still reads and what a writer still writes lie a few levels of nesting."""
    read_calls = xmlcalls.reader(xmlcalls.FUNCTION, ())
    for depth in range(10, 1100, 3):
        calls = read_calls(f"<function=edit><parameter=x>{'[' * depth}{']' * depth}</parameter></function>")
        assert [call.name for call in calls] == ["edit"]


def test_text_streams_as_it_comes(by_name: Callable[[str], FamilyRenderer], tokenizer: Tokenizer) -> None:
    parser = by_name("qwen3.5").parser([EDIT])
    assert joined(parser.push(sampled(tokenizer, "I think"))) == ("", "I think")
    assert joined(parser.push(sampled(tokenizer, ".\n</think>\n\nHello"))) == ("Hello", ".")
    assert joined(parser.push(sampled(tokenizer, "\n<tool_call>\n<function=edit>"))) == ("", "")
