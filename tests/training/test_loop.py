"""Whole training runs: sessions of a harness, a real engine, real updates; and what is left when one is killed."""

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

from polar.audit.run import audit_run
from polar.errors import InfrastructureError, UsageError
from polar.rollout.folder import RunFolder
from polar.specs import HarnessSpec
from polar.training.config import Schedule, TrainConfig
from polar.training.loop import BatchRecord, TrainFolder, train
from polar.training.metrics import FILE, read
from tests.training.bandit import DEATHS, Steps, config, tasks
from tests.training.models import tiny_dir

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)  # each runs an engine, and some run three


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dir(tmp_path_factory.mktemp("model"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(TrainFolder(folder).model / "model.safetensors")


def same(left: Path, right: Path) -> bool:
    one, two = weights(left), weights(right)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


async def replayed(run: Path, to: Path, spec: TrainConfig) -> Path:
    """A copy of a run without its checkpoints, trained again on what is stored."""
    shutil.copytree(run, to)
    shutil.rmtree(TrainFolder(to).checkpoints)
    shutil.rmtree(TrainFolder(to).model)
    await train(spec, tasks(), to, Steps())
    return to


@pytest.mark.heavy
async def test_a_bandit_is_solved_and_every_number_can_be_trusted(model: Path, tmp_path: Path) -> None:
    steps = Steps()
    spec = config(model, 9, group_size=16)
    await train(spec, tasks(), tmp_path / "run", steps)
    rewards = [values["reward"] for values in steps.values]
    assert np.mean(rewards[-2:]) > 2 * np.mean(rewards[:2])
    updates = [values for values in steps.values if "delta" in values]  # once it is solved, rewards may not differ any more
    assert len(updates) >= 3
    assert all(values["delta"] < 1e-4 for values in updates), "trainer and engine compute the same"
    assert all(values["trained_share"] == 1 for values in updates)
    assert all(0 < values["engine_busy"] <= 1 for values in steps.values)
    lines = read(tmp_path / "run" / FILE)
    assert [line["step"] for line in lines] == list(range(1, 10))
    folder = RunFolder(tmp_path / "run")
    assert audit_run(folder.ledger, folder.capture).findings == ()
    again = await replayed(tmp_path / "run", tmp_path / "again", spec)
    assert same(tmp_path / "run", again), "the stored sessions give the same weights, bit by bit"


@pytest.mark.heavy
@pytest.mark.parametrize("schedule", ["one_step_off", "async"])
async def test_rollouts_run_ahead_of_training_as_far_as_they_may(model: Path, tmp_path: Path, schedule: Schedule) -> None:
    spec, steps = config(model, 4, schedule), Steps()
    await train(spec, tasks(), tmp_path / "run", steps)
    assert max(values["staleness_max"] for values in steps.values) <= (1 if schedule == "one_step_off" else 2)
    last = msgspec.json.decode(TrainFolder(tmp_path / "run").batch(4).read_bytes(), type=BatchRecord)
    assert last.cursor.pending, "further groups were under way when the last batch was taken"
    again = await replayed(tmp_path / "run", tmp_path / "again", spec)
    assert same(tmp_path / "run", again)


@pytest.mark.heavy
@pytest.mark.parametrize("phase", sorted(DEATHS))
async def test_a_killed_run_goes_on_and_its_sessions_give_its_weights(model: Path, tmp_path: Path, phase: str) -> None:
    command = [sys.executable, "-m", "tests.training.bandit", str(model), str(tmp_path / "run"), "3"]
    died = subprocess.run([*command, phase], cwd=ROOT, capture_output=True, text=True, check=False)
    assert died.returncode == 9, died.stderr
    went_on = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert went_on.returncode == 0, went_on.stderr
    assert [line["step"] for line in read(tmp_path / "run" / FILE)] == [1, 2, 3]
    again = await replayed(tmp_path / "run", tmp_path / "again", config(model, 3))
    assert same(tmp_path / "run", again)


@pytest.mark.heavy
async def test_two_processes_train_and_one_goes_on_with_their_run(model: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*torchrun, "tests.training.bandit", str(model), str(tmp_path / "run"), "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = read(tmp_path / "run" / FILE)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["delta"] < 1e-4 for line in lines), "the engine samples from what the processes trained together"
    longer = Steps()
    await train(config(model, 3), tasks(), tmp_path / "run", longer)
    assert [values["delta"] < 1e-4 for values in longer.values] == [True]


@pytest.mark.heavy
async def test_a_run_is_made_longer_and_refuses_another_configuration(model: Path, tmp_path: Path) -> None:
    await train(config(model, 1), tasks(), tmp_path, Steps())
    longer = Steps()
    await train(config(model, 2), tasks(), tmp_path, longer)
    assert len(longer.values) == 1
    with pytest.raises(UsageError, match=r"was trained with another \[rollout\]"):
        await train(config(model, 2, group_size=4), tasks(), tmp_path, Steps())


@pytest.mark.heavy
async def test_sessions_that_all_fail_stop_the_run(model: Path, tmp_path: Path) -> None:
    silent = [structs.replace(task, harness=HarnessSpec("shell", {"command": "exit 3"})) for task in tasks()]
    with pytest.raises(InfrastructureError, match="none of 16 sessions has a reward.*without a model call"):
        await train(config(model, 1), silent, tmp_path, Steps())
