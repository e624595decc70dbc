"""The policy in the package: what it is, what it does through a real harness, and that the recipe makes such a one."""

from pathlib import Path

import msgspec
import pytest

from polar import run
from polar.engines.embedded.models import LAPTOP, resolve
from polar.engines.renderers import load_renderer
from polar.engines.tokenizers import load_tokenizer
from polar.laptop.recipe import Recipe, make
from polar.rollout.observer import Silent
from polar.tasks.workspace import workspace_tasks


class Notes(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def test_it_is_small_and_rendered_as_qwen3() -> None:
    directory = resolve(LAPTOP)
    assert sum(file.stat().st_size for file in directory.iterdir()) < 15_000_000
    assert load_renderer(directory).name.startswith("qwen3")


@pytest.mark.parametrize("text", ["echo 'bado kafi' > 'mute'", "snow ☃ \x00 \U0001f9ca", '{"command": "cat \\u0027lore\\u0027"}'])
def test_its_tokenizer_takes_any_text(text: str) -> None:
    tokenizer = load_tokenizer(resolve(LAPTOP))
    assert tokenizer.decode(tokenizer.encode_plain(text).tolist()) == text


@pytest.mark.heavy
def test_it_does_some_held_out_tasks_through_real_pi_and_not_all(tmp_path: Path) -> None:
    done = run(workspace_tasks("workspace:held_out:40"), harness="pi", model=LAPTOP, out=tmp_path)
    assert done.pass_at_1 is not None
    assert 0 < done.pass_at_1 < 1
    assert all(session.reward is not None for session in done.sessions)


@pytest.mark.heavy
async def test_the_recipe_makes_a_policy_that_learns_from_an_expert(tmp_path: Path) -> None:
    notes = Notes()
    reached = await make(Recipe({"pi": 1.0}, enough=0.02), tmp_path / "made", notes)
    assert reached >= 0.02
    assert any("the expert's dialogues" in line for line in notes.lines)
    assert msgspec.json.decode((tmp_path / "made" / "config.json").read_bytes())["dtype"] == "bfloat16"
    assert load_renderer(tmp_path / "made").name.startswith("qwen3")
