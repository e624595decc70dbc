"""`polar run` as a user runs it: to its end, stopped and gone on with, and when things break."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from polar.cli.runs import Run
from polar.errors import PolarError
from polar.store.ledger import LedgerSession
from tests.cli.conftest import Polar, start_polar

ASK = """
import json, os, urllib.request
body = {"model": os.environ["POLAR_MODEL"], "messages": [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
print(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read())
"""


def tasks(path: Path, *, line: str = f"{sys.executable} ask.py", asked: str = "How much is 6 × 7?", samples: int = 4) -> Path:
    """A file with one task for the harness `shell`."""
    task = {
        "id": "sum",
        "instruction": asked,
        "samples": samples,
        "workspace": {"ask.py": ASK},
        "harness": {"name": "shell", "options": {"command": line}},
        "evaluator": {"kind": "command", "command": 'grep -q 42 "$POLAR_ANSWER"'},
    }
    file = path / "sums.jsonl"
    file.write_text(json.dumps(task) + "\n")
    return file


def test_tasks_in_scored_sessions_out(home: Path, engine_url: str) -> None:
    running = start_polar("run", tasks(home), "--engine", engine_url, "--sandbox", "process", "--require-spread", cwd=home)
    told, errors = running.communicate(timeout=60)
    assert running.returncode == 0, told + errors
    results = Run.read(home / "runs" / "sums").results
    assert sorted(result.reward for result in results if result.reward is not None) == [0.0, 0.0, 1.0, 1.0]
    words = " ".join(told.split())
    assert "sum 0.50 (4) 4" in words
    assert "sandbox: process · 4 sessions · rewards vary within 1 of 1 tasks" in told
    for command in ("polar show runs/sums", f"polar show runs/sums/{results[0].session_id}", "polar audit runs/sums"):
        assert f"  {command}\n" in told


def test_the_commands_that_it_names_work(home: Path, engine_url: str, polar: Polar) -> None:
    told = polar("run", tasks(home), "--engine", engine_url, "--sandbox", "process").output
    commands = [line.split()[1:] for line in told.split("next:\n")[1].splitlines()]
    assert [command[0] for command in commands] == ["show", "show", "audit", "export"]
    for command in commands:
        assert polar(*command).exit_code == 0


def test_ctrl_c_stops_and_the_same_command_goes_on(home: Path, engine_url: str) -> None:
    command = ["run", tasks(home, asked="Say slowly."), "--engine", engine_url, "--sandbox", "process", "--concurrency", 2]
    running = start_polar(*command, cwd=home)
    wait_for_results(home / "runs" / "sums", 1)
    running.send_signal(signal.SIGINT)
    told, errors = running.communicate(timeout=30)
    assert running.returncode == 130, told + errors
    assert "nothing is lost: the same command goes on where this stopped" in told
    first = [result.session_id for result in Run.read(home / "runs" / "sums").results if result.reward is not None]
    assert 1 <= len(first) < 4

    again = start_polar(*command, cwd=home)
    told, errors = again.communicate(timeout=60)
    assert again.returncode == 0, told + errors
    assert f"{len(first)} of 4 sessions are finished already" in told
    results = Run.read(home / "runs" / "sums").results
    assert set(first) <= {result.session_id for result in results}
    assert all(result.reward is not None for result in results)


def test_ctrl_c_twice_stops_at_once(home: Path, engine_url: str) -> None:
    running = start_polar("run", tasks(home, asked="Say slowly."), "--engine", engine_url, "--sandbox", "process", cwd=home)
    wait_for_results(home / "runs" / "sums", 0)
    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGINT)
    time.sleep(0.05)
    if running.poll() is None:
        running.send_signal(signal.SIGINT)
    running.communicate(timeout=5)
    assert running.returncode == 130


def sessions_of(run: Path) -> tuple[LedgerSession, ...]:
    try:
        return Run.read(run).sessions
    except PolarError:  # it is just being made
        return ()


def wait_for_results(run: Path, number: int) -> None:
    """Until that many sessions have a reward, and one is running."""
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        sessions = sessions_of(run)
        done = sum(session.result is not None for session in sessions)
        if done >= number and any(session.stage == "running" for session in sessions):
            return
        time.sleep(0.05)
    pytest.fail("the run did not come so far")


def test_rewards_that_do_not_vary_fail_where_they_must(home: Path, engine_url: str, polar: Polar) -> None:
    command = ["run", tasks(home, samples=1), "--engine", engine_url, "--sandbox", "process"]
    assert polar(*command, "--out", "one").exit_code == 0
    told = polar(*command, "--out", "two", "--require-spread")
    assert told.exit_code == 1
    assert "in no task did the rewards of its samples differ" in told.output


def test_a_harness_that_never_calls_the_model_stops_the_run(home: Path, engine_url: str, polar: Polar) -> None:
    told = polar("run", tasks(home, line="true"), "--engine", engine_url, "--sandbox", "process")
    assert told.exit_code == 1
    assert "without a model call" in told.output


def test_sessions_without_a_reward_are_named_and_fail_the_run(home: Path, engine_url: str, polar: Polar) -> None:
    file = tasks(home, samples=2, line=f"{sys.executable} ask.py && kill -9 $$")
    told = polar("run", file, "--engine", engine_url, "--sandbox", "process")
    assert told.exit_code == 1
    assert "2 sessions have no reward; the same command retries them:" in told.output
    assert told.output.count("sum#") >= 2


def test_no_engine(home: Path, polar: Polar) -> None:
    told = polar("run", tasks(home), "--engine", "http://127.0.0.1:9")
    assert told.exit_code == 1
    assert "no engine answers at http://127.0.0.1:9" in told.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.yaml"], "nowhere.yaml: there is no such file"),
        (["sums.jsonl", "--harness", "p1"], "there is no harness 'p1'"),
        (["sums.jsonl", "--engine", "vllm"], "expected `embedded` or a URL"),
        (["sums.jsonl", "--concurrency", "0"], "--concurrency"),
        (["sums.jsonl", "--out", "sums.jsonl/x"], "--out sums.jsonl/x: Not a directory"),
    ],
)
def test_wrong_usage_is_named(home: Path, polar: Polar, arguments: list[str], said: str) -> None:
    tasks(home)
    told = polar("run", *arguments)
    assert told.exit_code == 2
    assert said in told.stderr
