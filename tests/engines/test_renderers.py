"""Which renderer a model directory gets, by its vocabulary and its own template."""

import json
import shutil
from pathlib import Path

import pytest

from polar.chat import Message, TextPart
from polar.engines.renderers import load_renderer
from polar.errors import UsageError
from tests import qwen3

PLAIN = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def model_dir(smollm2_dir: Path, tmp_path: Path) -> Path:
    """SmolLM2's tokenizer, its template still to be written."""
    shutil.copy(smollm2_dir / "tokenizer.json", tmp_path)
    config = json.loads((smollm2_dir / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def with_template(model_dir: Path, template: str) -> Path:
    (model_dir / "chat_template.jinja").write_text(template)
    return model_dir


def test_smollm2_speaks_chatml(smollm2_dir: Path) -> None:
    assert load_renderer(smollm2_dir).name.startswith("chatml-")


def test_a_vocabulary_of_chatml_without_a_template_speaks_it(model_dir: Path) -> None:
    assert load_renderer(model_dir).name.startswith("chatml-")


def test_a_template_that_differs_from_chatml_is_taken_as_it_is(model_dir: Path) -> None:
    loud = PLAIN.replace("'\n' + m.content", "':\n' + m.content").replace("assistant\n'", "assistant:\n'")
    renderer = load_renderer(with_template(model_dir, loud))
    assert renderer.name.startswith("template-")


def test_a_template_that_cannot_be_bridged_is_refused_and_chat_mode_named(model_dir: Path) -> None:
    unstable = PLAIN.replace("m.role +", "m.role + loop.index|string +")
    with pytest.raises(UsageError, match="--renderer none"):
        load_renderer(with_template(model_dir, unstable))


def test_names_are_listed_where_one_is_unknown(smollm2_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"auto, chatml, template, qwen3, .*glm-5.* got 'qwen9'"):
        load_renderer(smollm2_dir, "qwen9")


def test_a_family_that_is_not_the_models_is_refused(smollm2_dir: Path) -> None:
    with pytest.raises(UsageError, match="none of the family qwen3"):
        load_renderer(smollm2_dir, "qwen3")


def test_the_template_can_be_asked_for(smollm2_dir: Path) -> None:
    assert load_renderer(smollm2_dir, "template").name.startswith("template-")


def test_another_template_is_another_renderer(model_dir: Path) -> None:
    one = load_renderer(with_template(model_dir, PLAIN), "template").name
    assert load_renderer(with_template(model_dir, PLAIN + " "), "template").name != one


@pytest.mark.heavy
def test_qwen3_is_known_by_its_template(cache_dir: Path) -> None:
    renderer = load_renderer(qwen3.tokenizer_dir(cache_dir))
    assert renderer.name.startswith("qwen3-0.1.12-")
    assert [renderer.decode([id]) for id in renderer.stop_ids] == ["<|im_end|>", "<|endoftext|>"]


@pytest.mark.heavy
def test_a_name_outweighs_the_template(cache_dir: Path) -> None:
    assert load_renderer(qwen3.tokenizer_dir(cache_dir), "qwen3.5").name.startswith("qwen3.5-")


@pytest.mark.heavy
def test_qwen3_trained_not_to_think_opens_with_an_empty_thought(cache_dir: Path, tmp_path: Path) -> None:
    place = qwen3.tokenizer_dir(cache_dir)
    shutil.copytree(place, tmp_path / "model")
    config = json.loads((place / "tokenizer_config.json").read_text())
    template = config.pop("chat_template").replace("enable_thinking is defined and enable_thinking is false", "true")
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    renderer = load_renderer(with_template(tmp_path / "model", template))
    prompt = renderer.render([Message("user", (TextPart("Hi"),))], ())
    assert renderer.decode(prompt.tolist()).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
