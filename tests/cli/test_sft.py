"""`polar sft`: which chats it takes, and what it says of the others."""

import json
from pathlib import Path

from typer.testing import CliRunner

from polar.cli import app
from tests.training.models import tiny_dir


def sft(folder: Path, *weights: int) -> tuple[int, str]:
    """`polar sft` on chats whose one reply has these weights."""
    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": weight}] for weight in weights]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in turns))
    model = str(tiny_dir(folder / "model"))
    words = ["sft", str(folder / "chats.jsonl"), "--model", model, "--out", str(folder / "out"), "--batch", "2"]
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
