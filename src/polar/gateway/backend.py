"""What every call of a gateway uses, and which model answers it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polar.engines.served import Served
from polar.store.capture import CaptureStore


@dataclass(frozen=True)
class Backend:
    """What every call of a gateway uses.

    Attributes:
        capture: the file that `store` writes.
        routes: models that answer to names of their own; every other name is the policy's.
    """

    policy: Served
    store: CaptureStore
    capture: Path
    routes: Mapping[str, Served] = field(default_factory=dict)

    def served(self, model: str) -> Served:
        """Who answers to the name `model`."""
        return self.routes.get(model, self.policy)


def traced(served: Served) -> bool:
    """Whether its calls stand in the token tree: the policy's, if the engine shows their ids."""
    return served.trains and (served.renderer is not None or served.info.shows_ids)
