"""Runs with a scripted policy and a small agent."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from polar.engines.scripted import Scripted, ScriptedCall, ScriptedEngine, scripted_server
from polar.rollout.observer import Silent
from polar.rollout.runner import RunOptions
from polar.specs import EvaluatorSpec, HarnessSpec, SessionResult, Stage, Task, Timeouts

AGENT = Path(__file__).with_name("agent.py")


def write_and_answer(call: ScriptedCall) -> Scripted:
    """Write a file, then answer 42."""
    if call.turn == 0:
        return Scripted('<tool_call>\n{"name": "bash", "arguments": {"command": "echo 42 > made.txt"}}\n</tool_call>')
    return Scripted("The answer is 42.")


def agent_task(id: str = "write", mode: str = "", samples: int = 2, **changes: object) -> Task:
    """A task for the small agent, scored from the file that it wrote and from its answer."""
    command = f"AGENT_MODE={mode} exec {sys.executable} {AGENT}"
    fields: dict[str, object] = {
        "id": id,
        "instruction": "Write 42 into made.txt, and say it.",
        "harness": HarnessSpec("shell", {"command": command}),
        "evaluator": EvaluatorSpec(
            "command", 'grep -q 42 "$POLAR_ANSWER" && test "$(cat made.txt)" = "$(cat want)"', {"want": "42\n"}
        ),
        "samples": samples,
        "timeouts": Timeouts(run=60),
        **changes,
    }
    return Task(**fields)  # type: ignore[arg-type]


class Watching(Silent):
    """Remembers what a run tells."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.stages: list[tuple[str, Stage]] = []
        self.results: list[SessionResult] = []
        self.plan = (0, 0)

    def note(self, line: str) -> None:
        self.notes.append(line)

    def planned(self, sessions: int, finished: int) -> None:
        self.plan = (sessions, finished)

    def stage(self, session_id: str, task_id: str, sample: int, stage: Stage) -> None:
        self.stages.append((session_id, stage))

    def finished(self, result: SessionResult) -> None:
        self.results.append(result)


Policy = Callable[..., AbstractAsyncContextManager[tuple[ScriptedEngine, RunOptions]]]


@pytest.fixture
def policy(smollm2_dir: Path, tmp_path: Path) -> Policy:
    """`async with policy(script) as (engine, options)`: a scripted engine, and options for a run on it."""

    @asynccontextmanager
    async def start(
        script: Callable[[ScriptedCall], Scripted] = write_and_answer, max_model_len: int = 32_768
    ) -> AsyncIterator[tuple[ScriptedEngine, RunOptions]]:
        tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
        engine = ScriptedEngine(tokenizer, script, model_dir=smollm2_dir, max_model_len=max_model_len)
        async with scripted_server(engine) as url:
            yield engine, RunOptions(tmp_path / "run", url, sandbox="process", concurrency=4)

    return start
