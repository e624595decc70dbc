"""What a training step costs: the same sessions trained request by request, trace by trace, and as one tree; and beside TRL.

python -m benchmarks.trainer          about ten minutes on two cores; TRL is installed by `make trl`
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.sequences import VOCABULARY, Shape, per_request, shared
from polar.paths import cache_dir
from polar.training.config import ModelSpec, OptimizerSpec, TrainConfig
from polar.training.learner import Learner
from polar.training.packing import layouts
from polar.training.policy import load_policy
from polar.trajectory.forest import Forest

SHAPES = {
    "agent": Shape(groups=2, group_size=4, prompt=1_000, task=100, calls=12, reply=40, heard=120),
    "long prompt": Shape(groups=2, group_size=8, prompt=4_000, task=200, calls=3, reply=40, heard=80),
    "single turn": Shape(groups=4, group_size=8, prompt=16, task=496, calls=1, reply=128, heard=0),
}
Way = Literal["per request", "traces", "tree"]
WAYS: tuple[Way, ...] = ("per request", "traces", "tree")
ROUNDS = 3
TRL = cache_dir() / "trl-1.16.0" / "bin" / "python"
ROOT = Path(__file__).parents[1]


class Cost(Struct):
    """Of one optimiser step.

    Attributes:
        computed: tokens that went through the model; -1 where nobody tells.
        seconds: median of `ROUNDS`, after one that is not counted.
        memory: at its highest, less what the loaded model has, in MB.
    """

    computed: int
    seconds: float
    memory: float


def measure(model: Path, shape: Shape, way: Way) -> Cost:
    """The cost of a step in this process."""
    forest = shared(shape)
    if way == "per request":
        forest = per_request(forest)
    spec = ModelSpec(str(model), packing="tree" if way == "tree" else "traces", max_tokens=16_384)
    learner = Learner(load_policy(model, spec), TrainConfig(model=spec, optimizer=OptimizerSpec(lr=1e-5)))
    learned = int(forest.loss_mask.sum())
    weights = np.full(learned, 1 / learned, np.float32)
    before, seconds = _peak(), []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        learner.supervise(forest, weights)
        seconds.append(time.perf_counter() - began)
    return Cost(_computed(forest, way), median(seconds[1:]), _peak() - before)


def _computed(forest: Forest, way: Way) -> int:
    return sum(len(layout.ids) for layout in layouts(forest, 16_384, "tree" if way == "tree" else "traces"))


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024


def save_model(directory: Path) -> None:
    """A Qwen3-shaped model with 7 million parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=32_768,
    )
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).save_pretrained(directory)


def apart(model: Path, name: str, way: Way) -> Cost:
    """The cost of a step in a process of its own, so that its memory is its own."""
    command = [sys.executable, "-m", "benchmarks.trainer", "--model", str(model), "--shape", name, "--way", way]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Cost)


def trl(model: Path) -> Cost | None:
    """TRL's step on the single turns; None where it is not installed."""
    if not TRL.exists():
        return None
    shape = SHAPES["single turn"]
    command = [str(TRL), str(ROOT / "benchmarks" / "trl_step.py"), str(model), json.dumps(_single(shape)), str(ROUNDS)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"TRL failed:\n{done.stderr[-2_000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Cost)


def _single(shape: Shape) -> list[dict[str, Any]]:
    """Prompt and completion of each session of single turns."""
    forest = per_request(shared(shape))
    rows = []
    for node in range(0, len(forest.parents), 2):
        prompt, reply = (forest.ids[forest.bounds[at] : forest.bounds[at + 1]].tolist() for at in (node, node + 1))
        rows.append({"prompt_ids": prompt, "completion_ids": reply, "group": int(forest.sessions[node]) // shape.group_size})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=SHAPES, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        print(msgspec.json.encode(measure(options.model, SHAPES[options.shape], options.way)).decode())
        return
    table = Table("sessions", "way", "tokens computed", "step, s", "peak, MB", "× per request", box=None, pad_edge=False)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        save_model(model)
        for name in SHAPES:
            first: Cost | None = None
            for way in WAYS:
                cost = apart(model, name, way)
                first = first or cost
                ratio = f"{first.seconds / cost.seconds:.2f}"
                table.add_row(name, way, f"{cost.computed:,}", f"{cost.seconds:.2f}", f"{cost.memory:,.0f}", ratio)
            if name == "single turn" and first and (peer := trl(model)):
                ratio = f"{first.seconds / peer.seconds:.2f}"
                table.add_row(name, "TRL 1.16.0", "", f"{peer.seconds:.2f}", f"{peer.memory:,.0f}", ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
