"""`from polar import Task, run`."""

import asyncio
import sys
from pathlib import Path

import pytest

import polar
from polar import EvaluatorSpec, HarnessSpec, Task, run
from polar.errors import UsageError
from tests.rollout.conftest import AGENT, Policy


def hello() -> Task:
    return Task(
        id="hello",
        instruction="Say it.",
        harness=HarnessSpec("shell", {"command": f"exec {sys.executable} {AGENT}"}),
        evaluator=EvaluatorSpec("command", 'grep -q 42 "$POLAR_ANSWER"'),
    )


async def test_a_notebook_runs_tasks_and_gets_traces(policy: Policy, tmp_path: Path) -> None:
    async with policy() as (_, options):

        async def cell() -> polar.Run:
            """A notebook's cell runs inside an event loop."""
            return run([hello()], samples=2, engine=options.engine, sandbox="process", out=tmp_path / "out")

        done = await asyncio.to_thread(asyncio.run, cell())
    assert (done.pass_at_1, len(done.sessions)) == (1.0, 2)
    assert done.accounting.holds
    assert done.accounting.trained > 0
    assert [len(trajectory.traces) for trajectory in done.trajectories()] == [1, 1]
    assert [len(trajectory.traces) for trajectory in done.trajectories("per_request")] == [2, 2]


def test_a_script_gets_the_same_errors() -> None:
    with pytest.raises(UsageError, match="there is no harness 'py'"):
        run([hello()], harness="py")


def test_the_package_names_what_it_offers() -> None:
    assert all(getattr(polar, name) for name in polar.__all__)
    with pytest.raises(AttributeError, match="no attribute 'tusk'"):
        polar.tusk  # noqa: B018
