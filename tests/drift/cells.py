"""What the drift probe is held with: models, dialects and ways of asking, each mixture a cell of the table."""

import asyncio
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from polar.engines.embedded.models import resolve
from polar.engines.renderers import load_renderer
from polar.paths import cache_dir
from polar.tokens.rendering import Renderer
from tests import qwen3
from tests.drift.clients import CLIENTS
from tests.drift.dialogues import Spell, hermes, qwen35
from tests.drift.probe import Model, Outcome, probe

CHAT = "chat mode"
VOCABULARIES: dict[str, Callable[[], Path]] = {
    "SmolLM2": lambda: resolve("smollm2"),
    "Qwen3": lambda: qwen3.tokenizer_dir(cache_dir()),
}
SPELLS: dict[str, Spell] = {"chatml": hermes, "qwen3": hermes, "qwen3.5": qwen35, CHAT: hermes}


class Cell(Struct, frozen=True, order=True):
    """One mixture.

    Attributes:
        renderer: a name that `load_renderer` knows, or chat mode.
        canonical: the policy samples as the tokenizer encodes, as a trained one does most of the time.
    """

    renderer: str
    vocabulary: str
    dialect: str
    canonical: bool = False

    @property
    def name(self) -> str:
        return f"{self.renderer}, {self.vocabulary}, {self.dialect}" + (", canonical" if self.canonical else "")


_RENDERED = (("chatml", "SmolLM2"), ("chatml", "Qwen3"), ("qwen3", "Qwen3"), ("qwen3.5", "Qwen3"))
_CHATTED = ((CHAT, "SmolLM2"), (CHAT, "Qwen3"))
TOKEN_IN = tuple(Cell(*model, dialect) for model in _RENDERED for dialect in CLIENTS)
CHATTED = tuple(Cell(*model, dialect, canonical) for canonical in (False, True) for model in _CHATTED for dialect in CLIENTS)


def model(cell: Cell) -> Model:
    directory = VOCABULARIES[cell.vocabulary]()
    renderer = None if cell.renderer == CHAT else _renderer(directory, cell.renderer)
    return Model(directory, renderer, SPELLS[cell.renderer], cell.canonical)


@functools.cache
def _renderer(directory: Path, name: str) -> Renderer:
    return load_renderer(directory, name)


def held(cell: Cell, dialogues: int) -> Outcome:
    """The outcome of a cell, in an event loop of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(probe(model(cell), cell.dialect, range(dialogues), Path(folder)))
