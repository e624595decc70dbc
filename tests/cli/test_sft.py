"""`polar sft`: which chats it takes, and what it says of the others."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polar.cli import app
from polar.training.metrics import FILE, read
from tests.training.models import tiny_dir


def sft(folder: Path, *weights: int, options: Sequence[str] = ()) -> tuple[int, str]:
    """`polar sft` on chats whose one reply has these weights."""
    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": weight}] for weight in weights]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in turns))
    model = str(tiny_dir(folder / "model"))
    words = ["sft", str(folder / "chats.jsonl"), "--model", model, "--out", str(folder / "out"), "--batch", "2", *options]
    done = CliRunner().invoke(app, words)
    return done.exit_code, " ".join(done.output.split())


def test_chats_without_a_message_to_learn_are_left_out_and_counted(tmp_path: Path) -> None:
    status, output = sft(tmp_path, 1, 0, 1, 1)
    assert status == 0, output
    assert "3 chats, 1 without a message to learn left out, 2 steps" in output
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


def test_files_in_which_there_is_nothing_to_learn_are_named(tmp_path: Path) -> None:
    status, output = sft(tmp_path, 0, 0)
    assert status == 2
    assert f"nothing to learn in {tmp_path / 'chats.jsonl'}" in output
    assert not (tmp_path / "out").exists()


def test_chats_that_are_held_out_are_measured_and_not_learned(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    pairs = [("a", "b"), ("a", "c")]
    turns = [[{"role": "user", "content": user}, {"role": "assistant", "content": reply}] for user, reply in pairs]
    options = ["--held-out", str(held), "--lr", "1e-2", "--epochs", "4"]
    losses = []
    for turn in turns:
        held.write_text(json.dumps({"messages": turn}))
        status, output = sft(tmp_path, 1, 1, options=options)
        assert status == 0, output
        found = re.search(r"held-out loss (\S+) nats a token, before (\S+) \(1 chats\)", output)
        assert found, output
        losses.append((float(found[1]), float(found[2])))
        assert len(read(tmp_path / "out" / FILE)) == 4, "another training in the folder begins its metrics anew"
    (learned, at_first), (other, _) = losses
    assert at_first == pytest.approx(first_loss(tmp_path), rel=1e-3), "what is learned is measured alike"
    assert learned < at_first / 2
    assert other > learned
    held.write_text("")
    status, output = sft(tmp_path, 1, options=options)
    assert status == 2
    assert f"nothing to learn in {held}" in output


def first_loss(folder: Path) -> float:
    return read(folder / "out" / FILE)[0]["loss"]
