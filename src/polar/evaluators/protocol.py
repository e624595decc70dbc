"""What turns a finished session into a reward. It runs when the agent's processes are dead, on a copy of what they left."""

from pathlib import Path
from typing import Protocol

from msgspec import Struct

from polar.sandboxes.protocol import SandboxFactory
from polar.specs import SessionStatus, Task


class Finished(Struct, frozen=True):
    """What an evaluator may look at.

    Attributes:
        status: how the harness ended: `completed` or `timed_out`.
        exit_status: of the harness; not a success signal.
        workspace: a copy of the workspace on this machine.
        answer: the last text that the policy wrote to the harness.
        logs: directory for the evaluator's own output.
    """

    session_id: str
    status: SessionStatus
    exit_status: int
    workspace: Path
    answer: str
    logs: Path


class Evaluator(Protocol):
    """Scores sessions of one task."""

    kind: str

    async def score(self, task: Task, finished: Finished, sandboxes: SandboxFactory) -> float:
        """The reward.

        Raises:
            EvaluatorError: the evaluator broke or ran out of time; the session then has no reward.
        """
        ...
