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


class Score(Struct, frozen=True):
    """A reward, and what somebody who wonders about it should know (a time-out, a command that is not there)."""

    reward: float
    note: str = ""


class Evaluator(Protocol):
    """Scores sessions of one task."""

    kind: str

    async def score(self, task: Task, finished: Finished, sandboxes: SandboxFactory) -> Score:
        """The reward. What the agent left cannot take it away: a test that hangs or dies on it is reward 0.

        Raises:
            EvaluatorError: the evaluator itself broke; the session then has no reward.
        """
        ...
