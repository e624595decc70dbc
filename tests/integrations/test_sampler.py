"""A trainer calls for sessions, and waits."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar.audit.run import audit_run
from polar.errors import InfrastructureError, UsageError
from polar.rollout.folder import RunFolder
from polar.rollout.observer import Silent
from polar.specs import HarnessSpec, Stage, Task
from polar.store.ledger import LedgerReader
from polar.training.rollouts import ATTEMPTS
from polar.trajectory.export import Exported
from tests.integrations.conftest import Sampling, silent
from tests.integrations.letters import letters


def test_sessions_come_in_the_order_in_which_they_are_asked_for(sessions: dict[str, Exported]) -> None:
    assert [each.result.task_id for each in sessions.values()] == list(sessions)
    assert [len(each.trajectory.traces) for each in sessions.values()] == [1, 2, 0]


def test_each_call_makes_further_samples_and_so_does_another_start(sampling: Sampling, tmp_path: Path) -> None:
    task = letters("chain", "say something")
    with sampling([task], tmp_path) as made:
        found = made.sample(["chain", "chain"])
    with sampling([task], tmp_path) as made:
        found += made.sample(["chain"])
    assert [each.result.sample for each in found] == [0, 1, 2]
    folder = RunFolder(tmp_path)
    assert audit_run(folder.ledger, folder.capture).findings == ()


def test_the_tokens_say_which_weights_sampled_them(sampling: Sampling, tmp_path: Path) -> None:
    with sampling([letters("chain", "say something")], tmp_path) as made:
        made.publish(lambda directory: directory.mkdir(parents=True), 7)
        (session,) = made.sample(["chain"])
    assert [span.policy_version for span in session.trajectory.traces[0].policy_versions] == [7]


def test_a_task_that_is_not_there_is_named(sampling: Sampling, tmp_path: Path) -> None:
    with sampling([letters("chain", "say something")], tmp_path) as made, pytest.raises(UsageError, match="got 'chian'.*chain"):
        made.sample(["chain", "chian"])


def test_sessions_that_all_fail_are_an_error_after_some_attempts(sampling: Sampling, tmp_path: Path) -> None:
    with sampling([silent()], tmp_path) as made, pytest.raises(InfrastructureError, match="none of 1 sessions.*no_model_calls"):
        made.sample(["silent"])
    assert len(LedgerReader.open(RunFolder(tmp_path).ledger).sessions()) == ATTEMPTS


class Interrupting(Silent):
    """Presses Ctrl-C when a session runs."""

    def stage(self, session_id: str, task_id: str, sample: int, stage: Stage) -> None:
        if stage == "running":
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def hears_interrupts() -> Iterator[None]:
    """A shell's background job ignores them, and so does what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_interrupts")
def test_an_interrupt_ends_the_sessions_before_it_is_raised(sampling: Sampling, tmp_path: Path) -> None:
    slow = Task("slow", "say", harness=HarnessSpec("shell", {"command": "sleep 600"}))
    with sampling([slow], tmp_path, Interrupting()) as made:
        with pytest.raises(KeyboardInterrupt):
            made.sample(["slow"])
        (session,) = LedgerReader.open(RunFolder(tmp_path).ledger).sessions()
        assert session.result is not None
        assert session.result.status == "cancelled"
