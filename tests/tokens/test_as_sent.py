"""Histories by the template's own rules (T03): they leave out reasoning that `render` keeps."""

from pathlib import Path

import pytest
import tokenizers

from polar.chat import Message, TextPart
from polar.engines.renderers import load_renderer
from polar.tokens.rendering import Renderer, render_as_sent
from tests.tokens import standins

# Of qwen3 the library writes a history alike whatever it is told; qwen3.8's template keeps reasoning by itself.
FORGETS = {"qwen3.6": True, "glm-5": True, "nemotron-3": True, "hy3": True, "qwen3": False, "qwen3.8": False}


def said(role: str, text: str, reasoning: str = "") -> Message:
    return Message(role, (TextPart(text),), reasoning)  # type: ignore[arg-type]  # a literal, each time


HISTORY = [said("user", "q"), said("assistant", "one", "Because."), said("user", "again")]


@pytest.fixture(scope="module")
def model_dir(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a template, in whose vocabulary every family finds its control tokens."""
    place = tmp_path_factory.mktemp("model")
    grown = tokenizers.Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    grown.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in standins.tokenizer(grown).spellings])
    grown.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text("{}")
    return place


@pytest.mark.parametrize("name", FORGETS)
def test_earlier_reasoning_goes_where_the_family_forgets_it(name: str, model_dir: Path) -> None:
    renderer = load_renderer(model_dir, name)
    kept, sent = (renderer.decode(ids.tolist()) for ids in (renderer.render(HISTORY, ()), render_as_sent(renderer, HISTORY, ())))
    assert ("Because." in kept, "Because." in sent) == (True, False) if FORGETS[name] else kept == sent


def test_a_renderer_with_one_way_has_no_other(smollm2_dir: Path) -> None:
    for name in ("chatml", "template"):
        renderer: Renderer = load_renderer(smollm2_dir, name)
        assert render_as_sent(renderer, HISTORY, ()).tolist() == renderer.render(HISTORY, ()).tolist()
