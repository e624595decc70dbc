"""What of a chat is learned: the ids that a policy would have sampled, and nothing else."""

import json
from pathlib import Path

import numpy as np
import pytest

from polar.chat import Message
from polar.engines.renderers import load_renderer
from polar.errors import UsageError
from polar.tokens.rendering import Renderer
from polar.training.chats import chat_forest, read_chats
from polar.trajectory.forest import Forest, join
from tests.training.models import tiny_dir

SYSTEM: dict[str, object] = {"role": "system", "content": "You are brief."}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return load_renderer(tiny_dir(tmp_path_factory.mktemp("chats") / "model"))


def said(user: str, assistant: str, weight: int = 1) -> list[dict[str, object]]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant, "weight": weight}]


def forests(renderer: Renderer, folder: Path, *chats: list[dict[str, object]]) -> list[Forest]:
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    return [chat_forest(renderer, chat, str(place)) for place, chat in enumerate(read_chats(folder / "chats.jsonl"))]


def learned(renderer: Renderer, forest: Forest) -> list[str]:
    spans = zip(forest.bounds, forest.bounds[1:], forest.sampled, strict=False)
    return [renderer.decode(forest.ids[start:end].tolist()) for start, end, sampled in spans if sampled]


def test_replies_are_learned_to_the_id_that_ends_them(renderer: Renderer, tmp_path: Path) -> None:
    (forest,) = forests(renderer, tmp_path, [SYSTEM, *said("a", "bo"), *said("c", "do")])
    assert [text[:2] for text in learned(renderer, forest)] == ["bo", "do"]
    ends = forest.bounds[1:][forest.sampled.astype(bool)] - 1
    assert set(forest.ids[ends].tolist()) <= set(renderer.stop_ids)
    assert forest.loss_mask.sum() == sum(np.diff(forest.bounds)[forest.sampled.astype(bool)])


def test_turns_that_were_bridged_are_the_rendered_history(renderer: Renderer, tmp_path: Path) -> None:
    (forest,) = forests(renderer, tmp_path, [SYSTEM, *said("a", "bo"), *said("c", "do")])
    (chat,) = read_chats(tmp_path / "chats.jsonl")
    rendered = renderer.render((*chat.messages, Message("user")), chat.tools)
    assert np.array_equal(forest.ids, rendered[: len(forest.ids)])


def test_a_message_of_weight_zero_is_context(renderer: Renderer, tmp_path: Path) -> None:
    (forest,) = forests(renderer, tmp_path, [*said("a", "bo", 0), *said("c", "do"), *said("e", "fo", 0)])
    assert [text[:2] for text in learned(renderer, forest)] == ["do"]
    text = renderer.decode(forest.ids.tolist())
    assert "bo" in text
    assert "fo" not in text, "what follows the last learned message teaches nothing"


def test_a_chat_without_a_message_to_learn_is_refused(renderer: Renderer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to learn"):
        forests(renderer, tmp_path, said("a", "bo", 0))


def test_a_beginning_that_chats_share_is_computed_once(renderer: Renderer, tmp_path: Path) -> None:
    one, other = forests(renderer, tmp_path, [SYSTEM, *said("a", "bo")], [SYSTEM, *said("c", "do")])
    both = join([one, other])
    shared = int(np.argmin(one.ids[: len(other.ids)] == other.ids[: len(one.ids)]))
    assert shared > 5
    assert len(both.ids) == len(one.ids) + len(other.ids) - shared
    assert both.loss_mask.sum() == one.loss_mask.sum() + other.loss_mask.sum()
