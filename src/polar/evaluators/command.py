"""Scores what an agent left by a command of the task's author, in a fresh sandbox.

The agent's processes are dead, and the evaluator's files enter only now (D15).
"""

import asyncio
import math
import os
import re
from pathlib import Path

from polar.errors import EvaluatorError, SandboxError, UsageError
from polar.evaluators.protocol import Finished, Score
from polar.sandboxes.protocol import Exit, Sandbox, SandboxFactory, shell
from polar.sandboxes.supervisor import DROPPED
from polar.sandboxes.trees import relative_path
from polar.specs import EvaluatorSpec, Task

_ANSWER = "answer.txt"
_REWARD = re.compile(r"reward:(.*)")
_TAIL = 65536  # bytes of the output that are looked at for its last line
_NOT_RUNNABLE = (126, 127)  # what a shell says of a command that is not executable, or not there


class CommandEvaluator:
    """Runs the task's `evaluator.command` on a copy of the workspace.

    Exit status 0 is reward 1, or what it prints last as `reward: X` if the task says so. Every other end is reward 0 whatever
    it prints, since what it runs is the agent's: another status, a signal, a time-out, something that the agent put in the
    way of the evaluator's files. The score's note tells these apart from a plain "wrong".
    """

    kind = "command"

    async def score(self, task: Task, finished: Finished, sandboxes: SandboxFactory) -> Score:
        """See `Evaluator.score`. Output goes to `evaluator.out` and `evaluator.err` in `finished.logs`."""
        spec = task.evaluator
        if not spec.command.strip():
            raise UsageError(f"task {task.id!r}: evaluator `command` needs a `command`")
        out, err = finished.logs / "evaluator.out", finished.logs / "evaluator.err"
        if path := await asyncio.to_thread(_obstructed, finished.workspace, spec):
            return Score(0.0, f"{path}, where a file of the evaluator belongs, was obstructed by the agent")
        try:
            sandbox = await sandboxes.create(f"{finished.session_id}-score")
            try:
                ended = await _evaluate(spec, finished, sandbox, task.timeouts.score, out, err)
            finally:
                await sandbox.close()
        except SandboxError as error:
            raise EvaluatorError(f"the evaluator's sandbox failed: {error}") from error
        last_line = await asyncio.to_thread(_last_line, out) if spec.reward == "printed" else None
        return _score(ended, task.timeouts.score, last_line, err)


async def _evaluate(spec: EvaluatorSpec, finished: Finished, sandbox: Sandbox, timeout: float, out: Path, err: Path) -> Exit:
    await sandbox.put_tree(finished.workspace, into=sandbox.workspace)
    await sandbox.put(spec.files, into=sandbox.workspace)
    await sandbox.put({_ANSWER: finished.answer}, into=sandbox.home)
    command = shell(spec.command, {"POLAR_ANSWER": f"{sandbox.home}/{_ANSWER}"})
    return await sandbox.run(command, stdout=out, stderr=err, timeout=timeout)


def _obstructed(workspace: Path, spec: EvaluatorSpec) -> str:
    """The first of the evaluator's files that cannot be put where it belongs, or an empty text."""
    root = workspace.resolve()
    for name in spec.files:
        path = root / relative_path(name)
        ways = [parent for parent in path.parents if parent.is_relative_to(root)]
        leads_out = not path.parent.resolve().is_relative_to(root)
        if (
            leads_out
            or any(os.path.lexists(way) and not way.is_dir() for way in ways)
            or (path.is_dir() and not path.is_symlink())
        ):
            return name
    return ""


def _score(ended: Exit, timeout: float, last_line: str | None, err: Path) -> Score:
    if ended.timed_out:
        return Score(0.0, f"the evaluator did not end within {timeout:g} s; its output is in {err.parent}")
    if (number := _signal(ended.status)) > 0:
        return Score(0.0, f"the evaluator was ended by signal {number}; its output is in {err.parent}")
    if ended.status in _NOT_RUNNABLE:
        return Score(0.0, f"the evaluator's command cannot be run (exit status {ended.status}); see {err}")
    if ended.status != 0:
        return Score(0.0)
    if last_line is None:
        return Score(1.0)
    if last_line.startswith(DROPPED):
        raise EvaluatorError(f"the evaluator printed so much that its last line is lost; see {err.with_suffix('.out')}")
    match = _REWARD.match(last_line)
    if match is None:
        raise EvaluatorError(f"the evaluator's last line is no `reward: X`; see {err.with_suffix('.out')}")
    return Score(_parse(match[1], err))


def _signal(status: int) -> int:
    """The signal that ended a command, told by the system or by a shell (128 + n); 0 if none did."""
    return -status if status < 0 else status - 128 if 128 < status <= 128 + 64 else 0


def _parse(text: str, err: Path) -> float:
    try:
        reward = float(text)
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        raise EvaluatorError(f"`reward:{text}` is no finite number; the evaluator's output is in {err.parent}")
    return reward


def _last_line(out: Path) -> str:
    with out.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        return file.read().decode(errors="replace").strip().rpartition("\n")[2].strip()
