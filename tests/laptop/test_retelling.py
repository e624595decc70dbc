"""The expert's sessions told again, and the tokenizer that cuts them: a real harness's session is the material."""

import random
import re

import numpy as np
import pytest

from polar.chat import Message, TextPart, ToolCall
from polar.engines.renderers import load_renderer
from polar.laptop.expert import Dialogue
from polar.laptop.recipe import TOKENIZER_CONFIG
from polar.laptop.retelling import retold
from polar.laptop.vocabulary import CONTROL, train_tokenizer
from polar.tasks.workspace import SYLLABLES, Story, stories
from polar.tokens.rendering import Renderer
from polar.training.chats import chat_forest, whole

STORIES = {story.kind: story for story in stories("train", 3)}
OTHERS = {story.kind: story for story in stories("train", 3, 5)}


def told(story: Story) -> Dialogue:
    """A dialogue in which all that a harness may quote of a story is there."""
    messages = [
        Message("system", (TextPart("Date: 2026-12-01\nYou write files.\n"),)),
        Message("user", (TextPart(story.instruction),)),
    ]
    for number, step in enumerate(story.steps):
        shown = "".join(story.workspace.values()) if step.startswith("cat") else "Chunk ID: 00b3b9\n"
        messages += [
            Message("assistant", tool_calls=(ToolCall(str(number), "bash", f'{{"command":"{step}"}}'),)),
            Message("tool", (TextPart(shown),), tool_call_id=str(number)),
        ]
    return Dialogue("pi", story, (*messages, Message("assistant", (TextPart("Done."),))), ())


@pytest.mark.parametrize("kind", ["write", "copy", "pick"])
def test_another_story_takes_the_place_of_the_first_in_all_that_is_said(kind: str) -> None:
    again = retold(told(STORIES[kind]), OTHERS[kind], random.Random(0))
    fresh = told(OTHERS[kind])
    assert [message.tool_calls for message in again.messages] == [message.tool_calls for message in fresh.messages]
    assert [message.text for message in again.messages if "Chunk" not in message.text][1:] == [
        message.text for message in fresh.messages if "Chunk" not in message.text
    ][1:]


def test_days_and_ids_differ_and_the_rest_stays() -> None:
    original = told(STORIES["write"])
    texts = {retold(original, OTHERS["write"], random.Random(seed)).messages[0].text for seed in range(20)}
    assert len(texts) > 15
    assert all(text.startswith("Date: 20") and text.endswith("\nYou write files.\n") for text in texts)


def test_a_story_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="a write dialogue cannot tell a pick story"):
        retold(told(STORIES["write"]), OTHERS["pick"], random.Random(0))


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    import msgspec

    folder = tmp_path_factory.mktemp("tokenizer")
    lines = "\n".join(message.text for story in STORIES.values() for message in told(story).messages)
    train_tokenizer([lines], 600).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(TOKENIZER_CONFIG))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return load_renderer(folder)


def test_quoted_words_are_syllables_wherever_they_stand(renderer: Renderer) -> None:
    story = OTHERS["pick"]

    def pieces(*messages: Message) -> str:
        return "|".join(renderer.decode([token]) for token in renderer.render(messages, ()).tolist())

    alone = pieces(Message("user", (TextPart(f"'{story.wanted}'"),))).split("'")[1].strip("|")
    assert {piece.strip() for piece in alone.split("|")} <= {*SYLLABLES, ""}
    assert pieces(*told(story).messages).count(alone) == 2, "in the file's text, and in the command"


def test_its_control_tokens_are_qwens_and_every_text_survives(renderer: Renderer) -> None:
    text = "naïve <|im_end|> 'x' \\u0027mora tevi\\u0027 \t\r\n🙂"
    ids = renderer.render((Message("user", (TextPart(text),)),), ())
    assert renderer.name.startswith("qwen3")
    assert text in renderer.decode(ids.tolist())
    assert len(CONTROL) == 9


def test_every_turn_of_the_assistant_is_learned_and_nothing_else(renderer: Renderer) -> None:
    dialogue = told(OTHERS["copy"])
    forest = chat_forest(renderer, whole(dialogue.messages, dialogue.tools), "one")
    said = [
        renderer.decode(forest.ids[start:end].tolist())
        for start, end, learned in zip(forest.bounds, forest.bounds[1:], forest.sampled, strict=False)
        if learned
    ]
    first, second = OTHERS["copy"].steps
    assert [first in said[0], second in said[1], said[2]] == [True, True, "Done.<|im_end|>"]
    assert all(each.endswith("<|im_end|>") for each in said)
    assert forest.weights.sum() == pytest.approx(1)
    rendered = renderer.render((*dialogue.messages, Message("user")), ())
    assert np.array_equal(forest.ids, rendered[: len(forest.ids)]), "canonical turns, bridged, are the rendered history"


def test_a_line_that_harnesses_always_send_is_one_token_and_a_date_is_not() -> None:
    static = "You are an agent: use the tools, and answer briefly.\n"
    made = train_tokenizer([f"{static}Date: 2031-0{day}-1{day}\n" for day in range(1, 6)], 300)
    assert len(made.encode(static).ids) == 1
    assert len(made.encode("Date: 2038-07-21\n").ids) > 4
    assert made.decode(made.encode(static + "Date: 2038-07-21\n").ids) == static + "Date: 2038-07-21\n"


def test_a_machine_is_another_one_all_through_a_session_and_no_other_word_changes() -> None:
    shown = (
        "Linux 6.18.44-fc #1 SMP x86_64\n<timezone>Etc/UTC</timezone>\n<cwd>/workspace</cwd>\n"
        "- Docs: /opt/a/harnesses/pi-1/docs\n"
    )
    story = STORIES["write"]
    dialogue = Dialogue("pi", story, (Message("system", (TextPart(shown),)), Message("user", (TextPart(shown),))), ())
    seen = set()
    for seed in range(40):
        first, again = (message.text for message in retold(dialogue, OTHERS["write"], random.Random(seed)).messages)
        assert first == again
        found = re.fullmatch(
            r"Linux (\d\.\d+\.\d+\S*) #\S+ SMP .* (?:x86_64|aarch64)\n<timezone>([\w/]+)</timezone>\n<cwd>(\S*)/workspace</cwd>\n"
            r"- Docs: (/\S+)/harnesses/pi-1/docs\n",
            first,
        )
        assert found is not None
        seen.add(found.groups())
    assert len(seen) > 30
    assert {place for _, _, place, _ in seen} > {""}
