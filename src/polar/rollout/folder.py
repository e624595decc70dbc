"""The folder of a run: what is where.

| path | what |
|---|---|
| `ledger.db` | tasks, sessions, stages, results, the run's settings |
| `capture.db` | calls, token trees, messages |
| `engine.log` | output of the embedded engine |
| `sessions/{session_id}/` | output of harness and evaluator, and the workspace that the agent left |
"""

from dataclasses import dataclass
from pathlib import Path

from polar.errors import UsageError


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.db"

    @property
    def capture(self) -> Path:
        return self.path / "capture.db"

    @property
    def engine_log(self) -> Path:
        return self.path / "engine.log"

    def session(self, session_id: str) -> Path:
        return self.path / "sessions" / session_id

    @classmethod
    def existing(cls, path: Path) -> "RunFolder":
        """The folder of a run that was started.

        Raises:
            UsageError: there is no run at `path`.
        """
        folder = cls(path)
        if not folder.ledger.is_file() and folder.capture.is_file():
            raise UsageError(
                f"{path} is what a gateway captured alone, without tasks and rewards: `polar audit {path}` proves it, and "
                "`GET /sessions/ID/trajectory` of a `polar gateway --out` on it gives the traces of a session"
            )
        if not folder.ledger.is_file():
            raise UsageError(f"{path} is no run folder: it has no ledger.db. `polar run … --out {path}` makes one")
        return folder
