"""Real harnesses, a real model: SmolLM2 in the embedded engine. It answers, and calls no tools."""

import asyncio
import sys
from pathlib import Path

import pytest

from polar.cli.runs import Run
from polar.rollout.observer import Silent
from polar.rollout.runner import RunOptions, run_tasks
from polar.specs import EvaluatorSpec, HarnessSpec, SamplingSpec, Task


def question(harness: str, samples: int) -> Task:
    return Task(
        id="france",
        instruction="What is the capital of France?",
        harness=HarnessSpec(harness),
        evaluator=EvaluatorSpec("command", 'grep -qiw paris "$POLAR_ANSWER"'),
        sampling=SamplingSpec(max_tokens=16),
        samples=samples,
    )


@pytest.mark.timeout(400)
async def test_pi_asks_smollm2_and_the_model_confirms_every_log_probability(tmp_path: Path) -> None:
    summary = await run_tasks([question("pi", 2)], RunOptions(tmp_path / "run", concurrency=2), Silent())
    assert [(result.status, result.calls, result.traces) for result in summary.results] == [("completed", 1, 1)] * 2
    assert {result.reward for result in summary.results} <= {0.0, 1.0}
    assert Run.read(tmp_path / "run").meta["self_test"] == "10 proven"
    polar = Path(sys.executable).with_name("polar")
    audit = await asyncio.create_subprocess_exec(
        polar, "audit", tmp_path / "run", "--rescore", "embedded", stdout=asyncio.subprocess.PIPE
    )
    said, _ = await audit.communicate()
    assert audit.returncode == 0, said.decode()
    assert "proven" in said.decode()
    assert "mean δ" in said.decode()


@pytest.mark.heavy
@pytest.mark.timeout(600)
async def test_mini_swe_agent_gives_up_on_a_model_without_tools_and_every_turn_is_kept(tmp_path: Path) -> None:
    (result,) = (await run_tasks([question("mini_swe_agent", 1)], RunOptions(tmp_path / "run"), Silent())).results
    assert result.status == "completed"
    assert result.calls == 3, "it asks again after each reply without a tool call, and gives up after the third"
    assert result.accounting.holds
    assert result.accounting.trained > 0, "a turn that it drops from its history is a branch of its own"
    assert set(result.accounting.excluded) <= {"superseded"}, "unless it was cut by length and asked again (C05)"
