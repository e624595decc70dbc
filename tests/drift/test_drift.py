"""A small drift probe: what is trained is what the policy read and sampled. The whole one is `make drift-table`."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from polar.chat import Message
from polar.engines.scripted import Logged
from polar.engines.tokenizers import load_tokenizer
from polar.errors import BridgeRefused
from polar.specs import Int32Array
from polar.tokens.chatml import ChatMLRenderer
from polar.tokens.rendering import LastTurn
from tests.drift.cells import CHATTED, TOKEN_IN, Cell, model
from tests.drift.clients import CLIENTS, habits
from tests.drift.dialogues import hermes
from tests.drift.probe import Model, Outcome, breaks, probe
from tests.drift.table import chat_table, harness_table, replace, token_in_table

pytestmark = pytest.mark.heavy  # a quarter of a minute that `make test` does not have

FEW = (10, 21)  # between them, every habit and its contrary


def marked(cells: Sequence[Cell]) -> list[object]:
    """The cells as parameters; those with Qwen3's vocabulary, which has to be fetched first, are for the heavy tests."""
    marks = {"SmolLM2": (), "Qwen3": (pytest.mark.heavy,)}
    return [pytest.param(cell, id=cell.name, marks=marks[cell.vocabulary]) for cell in cells]


def test_few_dialogues_show_every_habit_and_its_contrary() -> None:
    assert all(len(set(kinds)) == 2 for kinds in zip(*(map(_flags, FEW)), strict=True))


def _flags(number: int) -> tuple[bool, ...]:
    shown = habits(number)
    return shown.respells, shown.forgets, shown.trims, shown.splits, shown.streams


@pytest.mark.parametrize("cell", marked(TOKEN_IN))
async def test_in_token_in_mode_a_dialogue_is_one_trace_without_a_break(cell: Cell, tmp_path: Path) -> None:
    outcome = await probe(model(cell), cell.dialect, FEW, tmp_path)
    assert (outcome.dialogues, outcome.breaks, outcome.traces) == (len(FEW), 0, len(FEW))
    assert not outcome.forks
    assert not outcome.excluded
    assert outcome.changes["arguments_respelled"] > 0, "histories came back spelled otherwise"
    assert outcome.changes["reasoning_changed"] > 0
    assert outcome.odd > outcome.calls * 0.9, "no tokenizer would encode what was sampled"


@pytest.mark.parametrize("cell", marked(CHATTED[::3]))
async def test_in_chat_mode_every_break_is_a_fork_with_a_name(cell: Cell, tmp_path: Path) -> None:
    outcome = await probe(model(cell), cell.dialect, FEW, tmp_path)
    assert outcome.breaks > 0
    assert sum(outcome.forks.values()) == outcome.breaks
    assert outcome.traces > outcome.dialogues
    assert set(outcome.excluded) <= {"superseded"}, "a cut reply that no later prompt holds to the token"


class Forgetful(ChatMLRenderer):
    """A renderer that writes every prompt anew from its messages, as a proxy does that keeps no ids."""

    def bridge(self, last: LastTurn, messages: Sequence[Message]) -> Int32Array:
        raise BridgeRefused("it keeps nothing")


async def test_the_probe_sees_what_is_encoded_anew(smollm2_dir: Path, tmp_path: Path) -> None:
    forgetful = Model(smollm2_dir, Forgetful(load_tokenizer(smollm2_dir)), hermes)
    outcome = await probe(forgetful, "openai_chat", FEW[:1], tmp_path)
    assert outcome.forks == {"bridge_refused": outcome.calls - 1}
    assert outcome.breaks >= outcome.odd - 1, "a reply of one letter may come back as it was"


def test_a_break_is_a_prompt_that_leaves_the_reply_before_it() -> None:
    log = [Logged("a", (1, 2), [3, 4]), Logged("b", (1, 2, 3, 4, 5), [6]), Logged("c", (1, 2, 3, 4, 5, 7), [8])]
    assert breaks(log[:2]) == 0
    assert breaks(log) == 1


def test_every_dialect_of_the_gateway_has_a_client() -> None:
    from polar.dialects import DIALECTS

    assert {dialect.name for dialect in DIALECTS} == set(CLIENTS)


def test_tables_say_what_was_seen(tmp_path: Path) -> None:
    outcome = Outcome(dialogues=2, calls=1200, breaks=3, traces=5)
    outcome.forks.update({"retokenised": 2, "drifted": 1})
    assert "| chatml | SmolLM2 | `openai_chat` | 2 | 1,200 | 0 | 0 | 3 | 5 |" in token_in_table({TOKEN_IN[0]: outcome})
    assert "| 3 | 5 | `retokenised` 2, `drifted` 1 |" in chat_table({CHATTED[0]: outcome})
    junit = tmp_path / "junit.xml"
    row = '["pi", "openai_chat", 1415, 11, 443, 9, 0, 1]'.replace('"', "&quot;")
    junit.write_text(f'<x><testcase><properties><property name="row" value="{row}"/></properties></testcase></x>')
    assert "| `pi` | `openai_chat` | 1,415 | 11 | 443 | 9 | 0 | 1 |" in harness_table(junit)
    assert replace("a\n<!-- t: make drift-table -->\nold\n<!-- /t -->\nb\n", "t", "new\n").split("\n")[2] == "new"
