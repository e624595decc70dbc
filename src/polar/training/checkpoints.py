"""Where training can go on from: weights, optimiser and place, written whole or not at all."""

import shutil
import tempfile
from pathlib import Path

import msgspec
from msgspec import Struct

from polar.errors import UsageError
from polar.training.durable import sync
from polar.training.learner import Learner
from polar.training.schedule import Cursor

STATE = "state.json"


class Place(Struct, frozen=True):
    """How far a run is.

    Attributes:
        step: batches trained on; also the policy version.
        cursor: which groups come next.
    """

    step: int = 0
    cursor: Cursor = Cursor()


class Checkpoints:
    """The checkpoints of a run, a directory each, named by the step."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, learner: Learner, place: Place) -> None:
        """Write one; it counts once all of it is on disk. Older ones go."""
        target = self._folder / f"{place.step:06}"
        building = Path(tempfile.mkdtemp(prefix=".checkpoint-", dir=self._folder))
        learner.save(building)
        (building / STATE).write_bytes(msgspec.json.encode(place))
        for path in (*building.iterdir(), building):
            sync(path)
        if target.exists():
            shutil.rmtree(target)
        building.rename(target)
        sync(self._folder)
        for old in self._complete()[: -self._keep]:
            shutil.rmtree(old)
        for broken in self._folder.glob(".checkpoint-*"):
            shutil.rmtree(broken, ignore_errors=True)

    def restore(self, learner: Learner) -> Place:
        """Go on from the newest; from the beginning where there is none.

        Raises:
            UsageError: it cannot be read, or is of another model.
        """
        complete = self._complete()
        if not complete:
            return Place()
        learner.restore(complete[-1])
        try:
            return msgspec.json.decode((complete[-1] / STATE).read_bytes(), type=Place)
        except (OSError, msgspec.DecodeError) as fault:
            raise UsageError(
                f"the checkpoint {complete[-1]} cannot be read: {fault}; remove it to go on from the one before"
            ) from None

    def _complete(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if path.name.isdigit())
