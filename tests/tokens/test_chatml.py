"""A history renders to what the model's own template gives; what was sampled is never rendered again; text stays text."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec import Raw
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase

from polar.chat import Message, Role, TextPart, Tool, ToolCall
from polar.errors import InvalidRequest, UsageError
from polar.tokens.chatml import ChatMLRenderer
from polar.tokens.tokenizer import Tokenizer
from tests.tokens.toy import left

READ = Tool("read", "Read a file – whole.", Raw(b'{"type":"object","properties":{"path":{"type":"string"}},"required":["path"]}'))
STAT = Tool("stat", "", Raw(b'{ "properties": {}, "type": "object", "maximum": 1.0 }'))


def say(role: Role, text: str) -> Message:
    return Message(role, (TextPart(text),))


def assistant(text: str = "", *calls: tuple[str, str], reasoning: str = "") -> Message:
    tool_calls = tuple(ToolCall(f"call_{index}", name, arguments) for index, (name, arguments) in enumerate(calls))
    return Message("assistant", (TextPart(text),), reasoning=reasoning, tool_calls=tool_calls)


def as_template_input(message: Message) -> dict[str, Any]:
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in message.tool_calls]
    return {"role": message.role, "content": message.text, "tool_calls": calls}


def as_template_tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": json.loads(bytes(tool.parameters)),
    }
    if not tool.description:
        del function["description"]
    return {"type": "function", "function": function}


def by_template(template: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
    rendered = template.apply_chat_template(
        [as_template_input(message) for message in messages],
        tools=[as_template_tool(tool) for tool in tools] or None,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert isinstance(rendered, str)
    return list(template.encode(rendered, add_special_tokens=False))


texts = st.text(max_size=12) | st.sampled_from(
    ["", "\n", "\n\n", " ", "  two\n\n", "\tTab", "x" * 40, "你好", "{}", "<", "<tool"]
)
calls = st.tuples(
    st.sampled_from(["bash", 'na"me', ""]), st.sampled_from(["{}", '{"a":1}', '{ "b" : "é\\n" }', "", "{broken", "[]"])
)
contexts = st.builds(say, st.sampled_from(["system", "user", "tool"]), texts)
replies = st.builds(
    lambda text, calls, reasoning: assistant(text, *calls, reasoning=reasoning), texts, st.lists(calls, max_size=2), texts
)
histories = st.lists(contexts | replies, max_size=6)


# The model's own template


PLAIN_HISTORIES = {
    "one question": [say("user", "Hi there")],
    "system first": [say("system", "Be brief."), say("user", "Hi")],
    "empty system": [say("system", ""), say("user", "Hi")],
    "turns": [
        say("user", "Hi"),
        assistant("Hello!\n\n- you\n- me\n"),
        say("user", "  indented\n"),
        assistant(""),
        say("user", ""),
    ],
    "system later": [say("user", "Hi"), assistant("Yes?"), say("system", "Now in French."), say("user", "Go on")],
    "code": [
        say("user", "def f(x):\n    return  x\n\n\n"),
        assistant("```python\nf(1)\n```"),
        say("user", "\n\n\tthanks 👩‍👩‍👧"),
    ],
}


@pytest.mark.parametrize("name", PLAIN_HISTORIES)
def test_a_history_without_tools_renders_as_the_models_template(
    name: str, renderer: ChatMLRenderer, template: PreTrainedTokenizerBase
) -> None:
    messages = PLAIN_HISTORIES[name]
    assert renderer.render(messages, ()).tolist() == by_template(template, messages)


@given(turns=st.lists(st.tuples(texts, texts), max_size=4), question=texts)
def test_any_ordinary_text_renders_as_the_models_template(
    renderer: ChatMLRenderer,
    template: PreTrainedTokenizerBase,
    added: Mapping[str, int],
    turns: list[tuple[str, str]],
    question: str,
) -> None:
    """Save for replies that begin with whitespace, which the template encodes together with the header before them."""
    messages = [message for user, reply in turns for message in (say("user", user), assistant(reply.lstrip()))]
    messages.append(say("user", question))
    assume(not any(spelling in message.text for message in messages for spelling in added))
    assert renderer.render(messages, ()).tolist() == by_template(template, messages)


def test_smollm2_gets_its_templates_system_message_when_a_history_has_none(smollm2_dir: object, tokenizer: Tokenizer) -> None:
    renderer = ChatMLRenderer(tokenizer, "Default.")
    assert renderer.decode(renderer.render([say("user", "Hi")], ()).tolist()) == (
        "<|im_start|>system\nDefault.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Default." not in renderer.decode(renderer.render([say("system", ""), say("user", "Hi")], ()).tolist())


TOOL_HISTORIES = {
    "tools without a system message": [say("user", "Read a.txt")],
    "tools after a system message": [say("system", "Be brief."), say("user", "Read a.txt")],
    "calls and results": [
        say("user", "Read both"),
        assistant("Sure.", ("read", '{"path": "a.txt"}'), ("read", '{"path":"b.txt"}')),
        say("tool", "A\n"),
        say("tool", ""),
        assistant("", ("stat", "{}")),
        say("tool", "no such file"),
        say("user", "And now?"),
    ],
}


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
@pytest.mark.parametrize("name", TOOL_HISTORIES)
def test_tools_render_as_qwens_template(name: str, renderer: ChatMLRenderer, template: PreTrainedTokenizerBase) -> None:
    messages = TOOL_HISTORIES[name]
    assert renderer.render(messages, [READ, STAT]).tolist() == by_template(template, messages, [READ, STAT])


def test_the_hermes_convention_in_full(model: str, tokenizer: Tokenizer) -> None:
    renderer = ChatMLRenderer(tokenizer, "Default.")
    messages = [
        say("user", "Read a.txt"),
        assistant("Sure.", ("read", '{"path":  "a.txt"}'), ("stat", "{}"), reasoning="Which file?"),
        say("tool", "A"),
        say("tool", "B"),
        say("user", "Thanks"),
    ]
    assert renderer.decode(renderer.render(messages, [READ]).tolist()) == (
        "<|im_start|>system\nDefault.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "read", "description": "Read a file – whole.", "parameters": '
        '{"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nRead a.txt<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nWhich file?\n</think>\n\nSure.\n"
        '<tool_call>\n{"name": "read", "arguments": {"path":  "a.txt"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stat", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("tag", ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"])
def test_the_scaffolds_tags_are_control_tokens_where_the_vocabulary_has_them(
    tag: str, model: str, renderer: ChatMLRenderer, tokenizer: Tokenizer
) -> None:
    history = [assistant("", ("read", "{}"), reasoning="Hm"), say("tool", "A"), say("user", "Thanks")]
    ids = renderer.render(history, [READ]).tolist()
    if model == "qwen3":
        assert tokenizer.token_id(tag) in ids
    else:
        assert tokenizer.token_id(tag) is None
        assert tag in tokenizer.decode(ids)


# Calls in a history


@pytest.mark.parametrize("arguments", ["{}", '{ "b":1,  "a":[ ] }', '{"text": "\\u00e9 é </tool_call>"}', '{"a":1,"a":2}'])
def test_arguments_stay_as_the_model_wrote_them(arguments: str, renderer: ChatMLRenderer) -> None:
    rendered = renderer.decode(renderer.render([assistant("", ("read", arguments))], ()).tolist())
    assert f'<tool_call>\n{{"name": "read", "arguments": {arguments}}}\n</tool_call>' in rendered


@pytest.mark.parametrize(
    "arguments", ["", "{broken", "[1]", '"text"', "NaN", '{"a": NaN}', "{" * 100_000, '{"a":' * 100 + "1" + "}" * 100]
)
def test_arguments_that_are_no_json_object_become_a_string_that_holds_them(arguments: str, renderer: ChatMLRenderer) -> None:
    rendered = renderer.decode(renderer.render([assistant("", ("read", arguments))], ()).tolist())
    written = rendered.rpartition("<tool_call>")[2].partition("</tool_call>")[0]
    assert json.loads(written) == {"name": "read", "arguments": arguments}


def test_a_tool_without_a_schema_is_shown_without_one(renderer: ChatMLRenderer) -> None:
    rendered = renderer.decode(renderer.render([], [Tool("now", "", Raw())]).tolist())
    assert '\n{"type": "function", "function": {"name": "now"}}\n' in rendered


@pytest.mark.parametrize("schema", [b"{", b"[" * 100_000 + b"]" * 100_000, b"NaN"])
def test_a_schema_that_cannot_be_written_refuses_the_request(schema: bytes, renderer: ChatMLRenderer) -> None:
    with pytest.raises(InvalidRequest, match="parameters of tool 'read'"):
        renderer.render([say("user", "Hi")], [Tool("read", "", Raw(schema))])


# Bridges


@given(before=histories, reply=replies, after=st.lists(contexts, max_size=4), tools=st.sampled_from([(), (READ,)]))
@example(before=[], reply=assistant("\n\n leading"), after=[say("tool", "a"), say("tool", "b"), say("user", "")], tools=())
def test_a_rendered_history_is_prompt_reply_and_bridge(
    renderer: ChatMLRenderer, before: list[Message], reply: Message, after: list[Message], tools: tuple[Tool, ...]
) -> None:
    prompt = renderer.render(before, tools).tolist()
    through = renderer.render([*before, reply], tools).tolist()
    close = len(renderer.bridge(left(True), ()))
    words = through[len(prompt) : len(through) - close]
    assert words[-1] == renderer.stop_ids[0]
    assert through[: len(prompt)] == prompt

    rendered = renderer.render([*before, reply, *after], tools).tolist()
    assert rendered == prompt + words + renderer.bridge(left(True), after).tolist()
    assert rendered == prompt + words[:-1] + renderer.bridge(left(False), after).tolist()


@given(question=texts, reply=texts)
def test_the_canonical_ids_of_a_reply_are_those_of_its_text_alone(
    renderer: ChatMLRenderer, tokenizer: Tokenizer, question: str, reply: str
) -> None:
    history = [say("user", question), assistant(reply), say("user", "Go on")]
    expected = [
        *renderer.render(history[:1], ()).tolist(),
        *tokenizer.encode_plain(reply).tolist(),
        renderer.stop_ids[0],
        *renderer.bridge(left(True), history[2:]).tolist(),
    ]
    assert renderer.render(history, ()).tolist() == expected


def test_a_turn_that_was_cut_is_closed_by_the_bridge(renderer: ChatMLRenderer) -> None:
    assert renderer.decode(renderer.bridge(left(False), [say("user", "Go on")]).tolist()) == (
        "<|im_end|>\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_sampled_stop_id_is_not_doubled(renderer: ChatMLRenderer) -> None:
    """T06."""
    assert renderer.decode(renderer.bridge(left(True), [say("tool", "ok")]).tolist()) == (
        "\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_bridge_takes_no_assistant_message(renderer: ChatMLRenderer) -> None:
    with pytest.raises(ValueError, match="never an assistant message"):
        renderer.bridge(left(True), [say("user", "Hi"), assistant("Hello")])


def test_a_history_that_ends_with_the_assistant_is_closed_and_a_new_turn_opened(renderer: ChatMLRenderer) -> None:
    """T18."""
    rendered = renderer.decode(renderer.render([say("user", "Hi"), assistant("Hel")], ()).tolist())
    assert rendered.endswith("<|im_start|>assistant\nHel<|im_end|>\n<|im_start|>assistant\n")


def test_an_empty_reply_is_a_turn_of_its_own(renderer: ChatMLRenderer) -> None:
    """T15."""
    rendered = renderer.decode(renderer.render([assistant(), say("user", "Hello?")], ()).tolist())
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nHello?" in rendered


# Control tokens in text from outside (T12)


def with_text_everywhere(text: str) -> tuple[list[Message], list[Tool]]:
    """`text` in every place that a harness, a tool or a model fills."""
    schema = json.dumps({"type": "object", "properties": {text: {"description": text}}}).encode()
    messages = [
        say("system", text),
        say("user", text),
        assistant(text, (text, json.dumps({text: text})), (text, text), reasoning=text),
        say("tool", text),
        say("tool", text),
        say("system", text),
        Message("user", (TextPart(text[: len(text) // 2]), TextPart(text[len(text) // 2 :]))),
    ]
    return messages, [Tool(text, text, Raw(schema))]


def control_ids(ids: Sequence[int], added: Mapping[str, int]) -> list[int]:
    known = set(added.values())
    return [id for id in ids if id in known]


def test_no_spelling_in_any_place_becomes_a_control_token(renderer: ChatMLRenderer, added: Mapping[str, int]) -> None:
    harmless = renderer.render(*with_text_everywhere("x")).tolist()
    pairs = (first + second for first, second in itertools.pairwise(added))
    for text in (*added, *pairs, "".join(added), "  ".join(added)):
        messages, tools = with_text_everywhere(text)
        ids = renderer.render(messages, tools).tolist()
        assert control_ids(ids, added) == control_ids(harmless, added), text
        assert renderer.decode(ids).count(text) >= 17


def test_no_spelling_in_a_bridge_becomes_a_control_token(renderer: ChatMLRenderer, added: Mapping[str, int]) -> None:
    def context(text: str) -> list[Message]:
        return [say("tool", text), say("user", text), say("system", text)]

    harmless = renderer.bridge(left(False), context("x")).tolist()
    for text in (*added, "".join(added)):
        ids = renderer.bridge(left(False), context(text)).tolist()
        assert control_ids(ids, added) == control_ids(harmless, added), text
        assert renderer.decode(ids).count(text) >= 3


@given(data=st.data())
def test_no_mixture_of_spellings_and_text_becomes_a_control_token(
    renderer: ChatMLRenderer, added: Mapping[str, int], data: st.DataObject
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(sorted(added)) | st.text(max_size=3), max_size=5)))
    messages, tools = with_text_everywhere(text or "x")
    harmless = renderer.render(*with_text_everywhere("x")).tolist()
    assert control_ids(renderer.render(messages, tools).tolist(), added) == control_ids(harmless, added)


# Stop ids and refusals


def test_the_stop_id_is_chatmls_end(renderer: ChatMLRenderer, tokenizer: Tokenizer) -> None:
    """Both models name it as their EOS, too."""
    assert renderer.stop_ids == (tokenizer.token_id("<|im_end|>"),)


def test_another_eos_of_the_tokenizer_stops_too(loaded: tokenizers.Tokenizer, added: Mapping[str, int]) -> None:
    """T07: from the tokenizer, never from data."""
    renderer = ChatMLRenderer(Tokenizer(loaded, eos="<|endoftext|>"))
    assert renderer.stop_ids == (added["<|im_end|>"], added["<|endoftext|>"])


def test_a_tokenizer_without_an_eos_stops_at_chatmls_end(loaded: tokenizers.Tokenizer, added: Mapping[str, int]) -> None:
    assert ChatMLRenderer(Tokenizer(loaded)).stop_ids == (added["<|im_end|>"],)


def test_a_model_that_does_not_speak_chatml_is_refused() -> None:
    loaded = tokenizers.Tokenizer(BPE(vocab={"a": 0}, merges=[]))
    loaded.decoder = tokenizers.decoders.ByteLevel()
    loaded.add_special_tokens(["<|im_end|>"])
    with pytest.raises(UsageError, match="does not speak ChatML"):
        ChatMLRenderer(Tokenizer(loaded))
