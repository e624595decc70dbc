"""Of several processes one leads: it rolls out, and whatever its learner is asked to do, all learners do.

The others wait for its orders. A refusal is the leader's to report: all of them compute the same, so all of them refuse.
"""

import signal
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Literal, NamedTuple

from polar.errors import CaptureError
from polar.specs import Float32Array
from polar.training.batch import Batch, Layout
from polar.training.config import TrainConfig
from polar.training.distributed import Ranks
from polar.training.learner import Learner
from polar.training.policy import Policy


class Order(NamedTuple):
    """What all do next."""

    what: Literal["update", "score", "save", "restore", "export", "end"]
    batch: Batch | None = None
    layout: Layout | None = None
    directory: Path | None = None
    adapter: bool = False


class Leader(Learner):
    """The first process's learner; each of its methods is everybody's. Threads may call them: one at a time goes through."""

    def __init__(self, policy: Policy, config: TrainConfig, ranks: Ranks) -> None:
        super().__init__(policy, config, ranks)
        self._turn = Lock()

    def update(self, batch: Batch) -> dict[str, float]:
        with self._turn:
            bare = replace(batch.forest, extras={})  # which may be large, and nothing is trained on them
            self._ranks.tell(Order("update", batch=replace(batch, forest=bare)))
            return super().update(batch)

    def score(self, layout: Layout) -> Float32Array:
        with self._turn:
            self._ranks.tell(Order("score", layout=layout))
            return super().score(layout)

    def save(self, directory: Path) -> None:
        with self._turn:
            self._ranks.tell(Order("save", directory=directory))
            super().save(directory)

    def restore(self, directory: Path) -> None:
        with self._turn:
            self._ranks.tell(Order("restore", directory=directory))
            super().restore(directory)

    def export(self, directory: Path, adapter: bool = False) -> None:
        with self._turn:
            self._ranks.tell(Order("export", directory=directory, adapter=adapter))
            super().export(directory, adapter)

    def dismiss(self) -> None:
        """Have the others end, after what is under way."""
        with self._turn:
            self._ranks.tell(Order("end"))


def follow(learner: Learner, ranks: Ranks) -> None:
    """Do what the leader says until it dismisses. Signals are the leader's to act on: a Ctrl-C reaches all processes."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    while True:
        order: Order = ranks.tell(None)
        match order:
            case Order("update", batch=Batch() as batch):
                try:
                    learner.update(batch)
                except CaptureError:
                    continue
            case Order("score", layout=Layout() as layout):
                learner.score(layout)
            case Order("save", directory=Path() as directory):
                learner.save(directory)
            case Order("restore", directory=Path() as directory):
                learner.restore(directory)
            case Order("export", directory=Path() as directory, adapter=adapter):
                learner.export(directory, adapter)
            case _:
                return
