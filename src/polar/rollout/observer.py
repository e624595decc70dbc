"""How a run tells whoever started it what happens."""

from typing import Protocol

from polar.specs import SessionResult, Stage


class Observer(Protocol):
    """Called in the run's event loop; must return at once."""

    def note(self, line: str) -> None:
        """Something worth a line: the engine is loading, the sandbox is bubblewrap, 3 sessions are resumed."""
        ...

    def planned(self, sessions: int, finished: int) -> None:
        """How many sessions the run has, and how many an earlier start of it has finished already."""
        ...

    def stage(self, session_id: str, task_id: str, sample: int, stage: Stage) -> None:
        """A session came to a stage."""
        ...

    def finished(self, result: SessionResult) -> None:
        """A session ended."""
        ...


class Silent:
    """Nobody is told."""

    def note(self, line: str) -> None: ...

    def planned(self, sessions: int, finished: int) -> None: ...

    def stage(self, session_id: str, task_id: str, sample: int, stage: Stage) -> None: ...

    def finished(self, result: SessionResult) -> None: ...
