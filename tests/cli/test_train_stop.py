"""`polar train` stopped by Ctrl-C, and gone on with."""

import json
import signal
import time
from pathlib import Path

import msgspec
import pytest

from polar.cli.runs import Run
from polar.training.metrics import FILE, read
from tests.cli.conftest import start_polar
from tests.training.bandit import tasks
from tests.training.models import tiny_dir


def wait_for_step(run: Path) -> None:
    """Until a step is measured."""
    deadline = time.monotonic() + 200
    while not (run / FILE).exists() or not read(run / FILE):
        assert time.monotonic() < deadline, "the run did not come so far"
        time.sleep(0.05)


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_ctrl_c_stops_training_and_the_same_command_goes_on(home: Path) -> None:
    (home / "letters.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, tasks())))
    (home / "letters.toml").write_text(f"""
[model]
path = {json.dumps(str(tiny_dir(home / "model")))}
[tasks]
sources = ["letters.jsonl"]
[rollout]
sandbox = "process"
concurrency = 4
group_size = 4
groups = 1
[run]
steps = 3
checkpoint_every = 1
""")
    command = ["train", "letters.toml", "--out", "run"]
    running = start_polar(*command, cwd=home)
    wait_for_step(home / "run")
    running.send_signal(signal.SIGINT)
    told, errors = running.communicate(timeout=60)
    assert running.returncode == 130, told + errors
    assert "nothing is lost: the same command goes on where this stopped" in " ".join(told.split())
    assert "Traceback" not in told + errors
    before = {result.session_id for result in Run.read(home / "run").results if result.reward is not None}

    again = start_polar(*command, cwd=home)
    told, errors = again.communicate(timeout=200)
    assert again.returncode == 0, told + errors
    assert "going on after step" in told or "training again on the sessions" in told
    assert [line["step"] for line in read(home / "run" / FILE)] == [1, 2, 3]
    assert before <= {result.session_id for result in Run.read(home / "run").results}
    assert (home / "run" / "model" / "model.safetensors").exists()
