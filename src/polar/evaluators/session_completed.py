"""The simplest evaluator: did the harness come to its end?"""

from polar.evaluators.protocol import Finished, Score
from polar.sandboxes.protocol import SandboxFactory
from polar.specs import Task


class SessionCompleted:
    """1 for a session that completed with exit status 0, else 0. Says nothing about what the agent did."""

    kind = "session_completed"

    async def score(self, task: Task, finished: Finished, sandboxes: SandboxFactory) -> Score:
        """See `Evaluator.score`."""
        return Score(1.0 if finished.status == "completed" and finished.exit_status == 0 else 0.0)
