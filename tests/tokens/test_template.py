"""A model's own template renders as transformers applies it; bridges are cut out of it; text stays text."""

from collections.abc import Mapping
from datetime import datetime

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from polar.chat import Message, Role, TextPart, Tool, ToolCall
from polar.errors import BridgeRefused, InvalidRequest, UsageError
from polar.tokens.rendering import LastTurn
from polar.tokens.stability import breaks
from polar.tokens.template import ChatTemplate, TemplateRenderer
from polar.tokens.tokenizer import Tokenizer
from tests.tokens.test_chatml import READ, by_template

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def say(role: Role, text: str) -> Message:
    return Message(role, (TextPart(text),))


def rendering(tokenizer: Tokenizer, source: str) -> TemplateRenderer:
    return TemplateRenderer(tokenizer, ChatTemplate(source, {"bos_token": "<|endoftext|>"}, datetime.now().strftime))


def ended(renderer: TemplateRenderer, *, stopped: bool = True) -> LastTurn:
    return LastTurn(np.asarray([5, renderer.stop_ids[0] if stopped else 5], np.int32), stopped)


@pytest.fixture
def own(tokenizer: Tokenizer, template: PreTrainedTokenizerBase) -> TemplateRenderer:
    source = template.chat_template
    assert isinstance(source, str)
    return rendering(tokenizer, source)


HISTORY = [say("system", "Be brief."), say("user", "Hi\n"), say("assistant", "Hello"), say("user", "Bye")]


def test_it_renders_what_transformers_renders(own: TemplateRenderer, template: PreTrainedTokenizerBase) -> None:
    assert own.render(HISTORY, ()).tolist() == by_template(template, HISTORY)


def test_what_marks_the_assistants_words_for_trainers_is_written_as_what_it_holds(
    tokenizer: Tokenizer, template: PreTrainedTokenizerBase
) -> None:
    body = "{% set x = m.content %}{% generation %}{% set x = 'no' %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ x }}"
    marked = CHATML.replace("+ m.content + '<|im_end|>\n' }}", "}}" + body)
    told = [{"role": message.role, "content": message.text} for message in HISTORY]
    text = template.apply_chat_template(told, chat_template=marked, add_generation_prompt=True, tokenize=False)
    renderer = rendering(tokenizer, marked)
    assert renderer.decode(renderer.render(HISTORY, ()).tolist()) == text


LOOPS, BRACKETS = "{% for a in b %}" * 30 + "{% endfor %}" * 30, "{{" + "(" * 2000 + ")" * 2000 + "}}"


@pytest.mark.parametrize("source", ["{% if %}", LOOPS, BRACKETS])
def test_what_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(UsageError, match="no Jinja template"):
        ChatTemplate(source, {}, datetime.now().strftime)


def test_it_is_proven_stable(own: TemplateRenderer) -> None:
    assert [found for found in breaks(own) if found.fatal] == []


def test_a_bridge_closes_what_was_cut(tokenizer: Tokenizer) -> None:
    renderer = rendering(tokenizer, CHATML)
    for stopped, close in ((True, ""), (False, "<|im_end|>")):
        ids = renderer.bridge(ended(renderer, stopped=stopped), [say("user", "More")])
        assert renderer.decode(ids.tolist()) == f"{close}\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"


def test_the_end_of_a_turn_comes_from_the_template(tokenizer: Tokenizer) -> None:
    assert rendering(tokenizer, CHATML).stop_ids[0] == tokenizer.token_id("<|im_end|>")
    with pytest.raises(UsageError, match="no control token"):
        rendering(tokenizer, CHATML.replace("<|im_end|>", "</turn>"))


def test_a_bos_stands_once_and_never_in_a_bridge(tokenizer: Tokenizer) -> None:
    renderer, bos = rendering(tokenizer, "{{ bos_token }}" + CHATML), tokenizer.token_id("<|endoftext|>")
    assert bos is not None
    assert renderer.render(HISTORY, ()).tolist().count(bos) == 1
    assert bos not in renderer.bridge(ended(renderer), [say("user", "More")]).tolist()


def test_a_template_that_writes_a_turn_by_what_came_before_it_is_found_out(tokenizer: Tokenizer) -> None:
    renderer = rendering(tokenizer, CHATML.replace("m.role +", "m.role + loop.index|string +"))
    assert any(found.fatal for found in breaks(renderer))


def test_tools_in_an_unknown_format_are_refused_with_the_way_out(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="chat mode"):
        rendering(tokenizer, CHATML).render(HISTORY, [READ])


def test_what_a_template_refuses_is_refused_in_its_words(tokenizer: Tokenizer) -> None:
    renderer = rendering(
        tokenizer, "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}" + CHATML
    )
    with pytest.raises(InvalidRequest, match="no tools here"):
        renderer.render([say("tool", "x")], ())


def test_a_template_reaches_nothing_outside_its_sandbox(tokenizer: Tokenizer) -> None:
    renderer = rendering(tokenizer, CHATML + "{{ ''.__class__.__mro__ if messages|length > 3 }}")
    with pytest.raises(InvalidRequest):
        renderer.render(HISTORY, ())


def test_a_template_that_hides_the_reply_is_not_bridged(tokenizer: Tokenizer) -> None:
    hiding = CHATML.replace("m.content +", "(m.content if loop.last or m.role != 'assistant' else '') +")
    with pytest.raises(BridgeRefused):
        rendering(tokenizer, hiding).bridge(ended(rendering(tokenizer, CHATML)), [say("user", "More")])


def test_no_spelling_in_any_place_becomes_a_control_token(own: TemplateRenderer, added: Mapping[str, int]) -> None:
    control = set(added.values())

    def scaffold(text: str) -> list[int]:
        call = ToolCall("c", text, f'{{"{text}": "{text}"}}' if text.isprintable() else "{}")
        messages = [
            say("system", text),
            say("user", text),
            Message("assistant", (TextPart(text),), text, (call,)),
            say("tool", text),
        ]
        tools = [Tool(text, text, READ.parameters)] if own.shows_tools else []
        ids = [*own.render(messages, tools).tolist(), *own.bridge(ended(own), [say("user", text)]).tolist()]
        return [id for id in ids if id in control]

    assert all(scaffold(spelling) == scaffold("Zq") for spelling in added)
