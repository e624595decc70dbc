"""Polar: reinforcement learning of language agents through harnesses that nobody had to change.

`Task` says what is asked, `run` runs it; everything else is in the packages. What is heavy is imported when it is used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polar.rollout.api import Run, run
    from polar.specs import EvaluatorSpec, HarnessSpec, SamplingSpec, Task, Timeouts
    from polar.version import __version__

_HOMES = {
    "Run": "polar.rollout.api",
    "run": "polar.rollout.api",
    "EvaluatorSpec": "polar.specs",
    "HarnessSpec": "polar.specs",
    "SamplingSpec": "polar.specs",
    "Task": "polar.specs",
    "Timeouts": "polar.specs",
    "__version__": "polar.version",
}

__all__ = ["EvaluatorSpec", "HarnessSpec", "Run", "SamplingSpec", "Task", "Timeouts", "__version__", "run"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'polar' has no attribute {name!r}")
