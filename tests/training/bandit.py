"""The smallest environment that goes the whole way: a shell harness that asks once, and a reward for letters.

Run as a program it trains, and dies where it is told to: `python -m tests.training.bandit MODEL OUT STEPS [PHASE]`.
"""

import asyncio
import os
import sys
from pathlib import Path

from msgspec import structs

from polar.rollout.observer import Silent
from polar.specs import EvaluatorSpec, HarnessSpec, SamplingSpec, Task
from polar.training.config import ModelSpec, OptimizerSpec, RolloutSpec, RunSpec, Schedule, TrainConfig

ASK = """
import json, os, urllib.request
said = [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]
body = json.dumps({"model": os.environ["POLAR_MODEL"], "messages": said}).encode()
key = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)).read()
"""
LETTERS = 8
REWARD = """n=$(LC_ALL=C tr -cd 'a-m' < "$POLAR_ANSWER" | wc -c)
awk "BEGIN{print \\"reward: \\" ($n > 8 ? 8 : $n) / 8}"
"""
DEATHS = {  # where a run dies, as (module, name, calls before)
    "rollout": ("polar.training.rollouts", "read_forests", 2),
    "record": ("polar.training.loop", "write_durably", 3),
    "update": ("polar.training.learner", "policy_loss", 2),
    "save": ("polar.training.policy", "shutil.copyfile", 12),
    "publish": ("polar.training.weights", "Publisher.load", 2),
    "measured": ("polar.training.metrics", "Metrics.write", 1),
    "checkpoint": ("polar.training.checkpoints", "sync", 3),
}


class Steps(Silent):
    """Remembers what each step said."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.values: list[dict[str, float]] = []

    def note(self, line: str) -> None:
        self.notes.append(line)

    def trained(self, step: int, steps: int, values: dict[str, float]) -> None:
        self.values.append(values)


def tasks() -> list[Task]:
    command = f"exec {sys.executable} -S -c '{ASK}'"
    one = Task(
        "letters",
        "say something",
        harness=HarnessSpec("shell", {"command": command}),
        evaluator=EvaluatorSpec("command", REWARD, reward="printed"),
        sampling=SamplingSpec(max_tokens=LETTERS),
    )
    return [one, structs.replace(one, id="more", instruction="say more")]


def config(model: Path, steps: int, schedule: Schedule = "sync", group_size: int = 8) -> TrainConfig:
    return TrainConfig(
        model=ModelSpec(str(model)),
        rollout=RolloutSpec(sandbox="process", concurrency=6, group_size=group_size, groups=2, schedule=schedule),
        optimizer=OptimizerSpec(lr=1e-2),
        run=RunSpec(steps=steps, checkpoint_every=2, keep=10),
    )


def die_at(phase: str) -> None:
    """Have the process end, as by `kill -9`, in a call of `phase`."""
    from importlib import import_module

    module, name, before = DEATHS[phase]
    place: object = import_module(module)
    *way, last = name.split(".")
    for part in way:
        place = getattr(place, part)
    original, calls = getattr(place, last), [0]

    def dying(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] > before:
            os._exit(9)
        return original(*args, **kwargs)

    setattr(place, last, dying)


def main(model: Path, out: Path, steps: int, phase: str = "") -> None:
    import torch

    from polar.training.loop import accompany, train

    torch.set_num_threads(1)
    if int(os.environ.get("RANK", "0")):  # of `torchrun`
        return accompany(config(model, steps))
    if phase:
        die_at(phase)
    asyncio.run(train(config(model, steps), tasks(), out, Steps()))
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
