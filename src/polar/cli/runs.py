"""Finds what a user names: run folders and their sessions."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from polar.errors import StoreError, UsageError
from polar.rollout.folder import RunFolder
from polar.specs import SessionResult, Task
from polar.store.ledger import LedgerReader, LedgerSession

RUNS = Path("runs")


@dataclass(frozen=True)
class Run:
    """What the ledger of a run says."""

    folder: RunFolder
    tasks: tuple[Task, ...]
    sessions: tuple[LedgerSession, ...]
    meta: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Read the ledger of the run at `path`.

        Raises:
            UsageError: there is no run.
            StoreError: its ledger cannot be read.
        """
        folder = RunFolder.existing(path)
        with closing(LedgerReader.open(folder.ledger)) as reader:
            return cls(folder, tuple(reader.tasks()), tuple(reader.sessions()), reader.meta())

    @property
    def results(self) -> tuple[SessionResult, ...]:
        """The result of each sample's last finished attempt, in order of tasks and samples."""
        last = {(session.task_id, session.sample): session.result for session in self.sessions if session.result is not None}
        return tuple(last.values())

    def session(self, session_id: str) -> LedgerSession:
        """A session by its id. `UsageError` if the run has none of this id."""
        for session in self.sessions:
            if session.session_id == session_id:
                return session
        raise UsageError(f"there is no session {session_id!r} in {self.folder.path}; `polar show {self.folder.path}` lists them")


def find(target: str, run: Path | None) -> tuple[Run, LedgerSession | None]:
    """The run that `target` names, or the run and the session.

    Args:
        target: folder of a run, that and a session's id, or the id alone.
        run: where to look for an id alone; None looks in all runs below `runs/`.

    Raises:
        UsageError: nothing is found.
    """
    path = Path(target)
    if run is not None:
        return _both(run, target)
    if RunFolder(path).ledger.is_file():
        return Run.read(path), None
    if RunFolder(path.parent).ledger.is_file():
        return _both(path.parent, path.name)
    for folder in (path, path.parent):
        if RunFolder(folder).capture.is_file():
            RunFolder.existing(folder)  # says what it is instead
    for candidate in _runs():
        if target in (session.session_id for session in candidate.sessions):
            return candidate, candidate.session(target)
    raise UsageError(f"{target} is neither the folder of a run, nor RUN/SESSION, nor a session of a run below {RUNS}/")


def _both(run: Path, session_id: str) -> tuple[Run, LedgerSession]:
    found = Run.read(run)
    return found, found.session(session_id)


def _runs() -> Iterator[Run]:
    for ledger in sorted(RUNS.glob("*/ledger.db")):
        try:
            yield Run.read(ledger.parent)
        except StoreError:
            continue  # another run's damage is no reason not to find a session
