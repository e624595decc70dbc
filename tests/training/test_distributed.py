"""Several processes compute what one does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polar.training.distributed import Ranks
from polar.training.learner import OPTIMIZER, WEIGHTS
from polar.training.packing import layouts
from tests.training.forests import random_forest
from tests.training.models import tiny_dir
from tests.training.together import KINDS, batch, live, made

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, "-m", "tests.training.together", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two")
    done = run(model, out)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def apart(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Relative distance."""
    distance = sum(float((one - other).square().sum()) for one, other in zip(left, right, strict=True))
    return float((distance / sum(float(one.square().sum()) for one in left)) ** 0.5)


def slopes(folder: Path) -> list[torch.Tensor]:
    """The means of gradients that the optimiser keeps."""
    state = torch.load(folder / OPTIMIZER, weights_only=True)["optimizer"]["state"]
    return [moments["exp_avg"] for moments in state.values()]


def weights(folder: Path) -> list[torch.Tensor]:
    return list(load_file(folder / WEIGHTS).values())


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one_does(model: Path, two: Path, tmp_path: Path, kind: str) -> None:
    live(made(model, kind), tmp_path)
    assert apart(slopes(tmp_path / "half"), slopes(two / kind / "half")) < 1e-4
    assert apart(weights(tmp_path / "end"), weights(two / kind / "end")) < 1e-4
    one, other = (json.loads((folder / "metrics.json").read_text()) for folder in (tmp_path, two / kind))
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        same = {name: value for name, value in mine.items() if "second" not in name}
        assert same == pytest.approx({name: theirs[name] for name in same}, rel=1e-3, abs=1e-6)
    assert one[1] == {"L03": 1.0}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_go_on_bit_by_bit_and_one_goes_on_from_what_they_wrote(
    model: Path, two: Path, tmp_path: Path, kind: str
) -> None:
    end = weights(two / kind / "end")
    assert all(map(torch.equal, end, weights(two / kind / "again")))
    one = made(model, kind)
    one.restore(two / kind / "half")
    one.update(batch(1))
    one.save(tmp_path)
    assert apart(end, weights(tmp_path)) < 1e-5
    one.restore(two / kind / "end")
    one.export(tmp_path / "model")
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", two / kind / "model"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.heavy
def test_where_one_process_dies_all_end(model: Path, tmp_path: Path) -> None:
    assert run(model, tmp_path, "die").returncode != 0


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_each_pass_counts_once_and_all_processes_have_as_many(world: int) -> None:
    passes = layouts(random_forest(0), 60, "tree")
    dealt = [Ranks(rank, world).share(passes) for rank in range(world)]
    assert len({len(own) for own in dealt}) == 1
    counted = [id(each.layout) for own in dealt for each in own if each.counts]
    assert sorted(counted) == sorted(map(id, passes))
    loads = [sum(len(each.layout.ids) for each in own if each.counts) for own in dealt]
    assert max(loads) - min(loads) <= max(len(each.ids) for each in passes)
