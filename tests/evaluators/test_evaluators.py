"""Rewards of finished sessions."""

import re
from pathlib import Path
from typing import Literal

import pytest

from polar import evaluators
from polar.errors import EvaluatorError, UsageError
from polar.evaluators import Finished, Score
from polar.sandboxes import SandboxFactory, choose
from polar.specs import EvaluatorSpec, SessionStatus, Task, Timeouts
from tests.sandboxes.conftest import need_bubblewrap


@pytest.fixture(params=["process", "bubblewrap"])
def factory(request: pytest.FixtureRequest, tmp_path: Path) -> SandboxFactory:
    if request.param == "bubblewrap":
        need_bubblewrap()
    return choose(request.param, tmp_path / "sandboxes")


@pytest.fixture
def finished(tmp_path: Path) -> Finished:
    workspace, logs = tmp_path / "left", tmp_path / "logs"
    workspace.mkdir()
    logs.mkdir()
    (workspace / "result.txt").write_text("42\n")
    return Finished("s1", "completed", 0, workspace, "The answer is 42.", logs)


async def score(
    finished: Finished, factory: SandboxFactory, command: str, files: dict[str, str] | None = None, timeout: float = 20
) -> float:
    return (await judge(finished, factory, command, files, timeout)).reward


async def judge(
    finished: Finished, factory: SandboxFactory, command: str, files: dict[str, str] | None = None, timeout: float = 20
) -> Score:
    kind: Literal["exit_status", "printed"] = "printed" if "reward:" in command else "exit_status"
    spec = EvaluatorSpec("command", command, files or {}, kind)
    task = Task("t", "do it", evaluator=spec, timeouts=Timeouts(score=timeout))
    return await evaluators.get("command").score(task, finished, factory)


@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("grep -q 42 result.txt", 1.0),
        ("grep -q 43 result.txt", 0.0),
        ("echo reward: 0.25", 0.25),
        ("echo reward: -3e-1", -0.3),
        ("echo reward: 1; exit 1", 0.0),
        ("echo 'reward: 0.5'; echo; echo", 0.5),
        ("yes | head -c 1000000; echo reward:7", 7.0),
    ],
)
async def test_the_exit_status_is_the_reward_unless_the_last_line_says_another(
    command: str, reward: float, finished: Finished, factory: SandboxFactory
) -> None:
    assert await score(finished, factory, command) == reward


async def test_what_the_agents_code_prints_is_no_reward_unless_the_task_says_so(
    finished: Finished, factory: SandboxFactory
) -> None:
    spec = EvaluatorSpec("command", "echo reward: 1e9")
    verdict = await evaluators.get("command").score(Task("t", "do it", evaluator=spec), finished, factory)
    assert verdict == Score(1.0)


async def test_the_evaluators_files_and_the_answer_are_there(finished: Finished, factory: SandboxFactory) -> None:
    files = {"tests/check.sh": 'grep -q 42 "$POLAR_ANSWER" && grep -q 42 result.txt'}
    assert await score(finished, factory, "sh tests/check.sh", files) == 1.0


async def test_the_agents_version_of_an_evaluators_file_is_replaced(finished: Finished, factory: SandboxFactory) -> None:
    (finished.workspace / "check.sh").write_text("echo reward: 1")
    assert await score(finished, factory, "sh check.sh", {"check.sh": "exit 1"}) == 0.0
    assert (finished.workspace / "check.sh").read_text() == "echo reward: 1"  # the copy that was handed in is untouched


@pytest.mark.parametrize("obstacle", ["link out", "link to nothing", "file", "directory"])
async def test_an_agent_gains_nothing_by_standing_in_the_way(obstacle: str, finished: Finished, factory: SandboxFactory) -> None:
    tests = finished.workspace / "tests"
    match obstacle:
        case "link out":
            tests.symlink_to("/tmp")
        case "link to nothing":
            tests.symlink_to("nothing")
        case "file":
            tests.touch()
        case "directory":
            (tests / "check.sh").mkdir(parents=True)
    verdict = await judge(finished, factory, "true", {"tests/check.sh": "exit 0"})
    assert verdict == Score(0.0, "tests/check.sh, where a file of the evaluator belongs, was obstructed by the agent")


async def test_a_link_within_the_workspace_is_not_in_the_way(finished: Finished, factory: SandboxFactory) -> None:
    (finished.workspace / "src").mkdir()
    (finished.workspace / "tests").symlink_to("src")
    assert await score(finished, factory, "sh src/check.sh", {"tests/check.sh": "exit 0"}) == 1.0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo reward: much", "is no finite number"),
        ("echo reward: nan", "is no finite number"),
        ("echo reward: inf", "is no finite number"),
        ("echo reward:", "is no finite number"),
        ("echo reward: 0.5; echo done", "last line is no `reward: X`"),
        ("echo reward: 0.5 >&2", "last line is no `reward: X`"),
    ],
)
async def test_a_malformed_reward_is_no_reward(command: str, message: str, finished: Finished, factory: SandboxFactory) -> None:
    with pytest.raises(EvaluatorError, match=message):
        await score(finished, factory, command)


@pytest.mark.parametrize(
    ("command", "note"),
    [
        ("no-such-program", "cannot be run .exit status 127.*evaluator.err"),
        ("./result.txt", "cannot be run .exit status 126"),
        ("kill -9 $$", "ended by signal 9"),
        ("sh -c 'kill -9 $$'; exit $?", "ended by signal 9"),
    ],
)
async def test_a_test_that_breaks_on_what_the_agent_left_is_zero_with_a_note(
    command: str, note: str, finished: Finished, factory: SandboxFactory
) -> None:
    verdict = await judge(finished, factory, command)
    assert verdict.reward == 0.0
    assert re.search(note, verdict.note)
    assert list(Path(finished.logs.parent / "sandboxes").iterdir()) == []


async def test_a_test_that_hangs_on_what_the_agent_left_is_zero(finished: Finished, factory: SandboxFactory) -> None:
    verdict = await judge(finished, factory, "echo started; sleep 600", timeout=0.5)
    assert verdict.reward == 0.0
    assert "did not end within 0.5 s" in verdict.note
    assert (finished.logs / "evaluator.out").read_text() == "started\n"
    assert list(Path(finished.logs.parent / "sandboxes").iterdir()) == []


async def test_an_evaluator_that_prints_too_much_gives_no_reward(
    finished: Finished, factory: SandboxFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polar.sandboxes.processes.OUTPUT_LIMIT", 1000)
    with pytest.raises(EvaluatorError, match="its last line is lost"):
        await score(finished, factory, "yes | head -c 5000; echo reward: 1")


async def test_a_command_must_be_given_and_its_files_must_have_paths_of_their_own(
    finished: Finished, factory: SandboxFactory
) -> None:
    with pytest.raises(UsageError, match="needs a `command`"):
        await score(finished, factory, " ")
    with pytest.raises(UsageError, match="without `\\.\\.`"):
        await score(finished, factory, "true", {"../x": ""})


@pytest.mark.parametrize(
    ("status", "exit_status", "reward"),
    [("completed", 0, 1.0), ("completed", 1, 0.0), ("timed_out", 0, 0.0), ("timed_out", -9, 0.0)],
)
async def test_session_completed(status: SessionStatus, exit_status: int, reward: float, tmp_path: Path) -> None:
    finished = Finished("s1", status, exit_status, tmp_path, "", tmp_path)
    verdict = await evaluators.get("session_completed").score(Task("t", "do it"), finished, choose("process", tmp_path))
    assert verdict == Score(reward)


def test_an_unknown_kind_is_answered_with_those_that_exist() -> None:
    assert evaluators.kinds() == ("command", "session_completed")
    with pytest.raises(
        UsageError, match=r"no evaluator 'comand' \(did you mean 'command'\?\); there are command, session_completed"
    ):
        evaluators.get("comand")
