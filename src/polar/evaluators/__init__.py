"""What turns finished sessions into rewards."""

from difflib import get_close_matches

from polar.errors import UsageError
from polar.evaluators.command import CommandEvaluator
from polar.evaluators.protocol import Evaluator, Finished, Score
from polar.evaluators.session_completed import SessionCompleted

__all__ = ["Evaluator", "Finished", "Score", "get", "kinds"]

_EVALUATORS: tuple[Evaluator, ...] = (CommandEvaluator(), SessionCompleted())


def kinds() -> tuple[str, ...]:
    """Kinds of evaluators that there are."""
    return tuple(evaluator.kind for evaluator in _EVALUATORS)


def get(kind: str) -> Evaluator:
    """The evaluator of that kind.

    Raises:
        UsageError: there is none; names those that exist.
    """
    for evaluator in _EVALUATORS:
        if evaluator.kind == kind:
            return evaluator
    close = get_close_matches(kind, kinds(), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UsageError(f"there is no evaluator {kind!r}{hint}; there are {', '.join(kinds())}")
