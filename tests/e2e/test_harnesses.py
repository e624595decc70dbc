"""Real harnesses through the real gateway, the policy being a script: every id is held against the policy's own log."""

import json
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from polar.cli import app
from polar.engines.scripted import Logged, Scripted, ScriptedCall, ScriptedEngine, scripted_server
from polar.rollout.folder import RunFolder
from polar.rollout.observer import Silent
from polar.rollout.runner import RunOptions, SandboxChoice, run_tasks
from polar.specs import EvaluatorSpec, HarnessSpec, SessionResult, Task, Timeouts
from polar.store.captured import read_captured
from polar.trajectory.builders import build


def calls(*wanted: tuple[str, dict[str, object]], before: str = "") -> Scripted:
    """A reply with tool calls, spelled as no serialiser spells them."""
    spelled = [
        f'<tool_call>\n{{"name":  "{name}", "arguments": {json.dumps(args, indent=1)}}}\n</tool_call>' for name, args in wanted
    ]
    return Scripted(before + "\n".join(spelled), tokens_per_chunk=5)


def pi_policy(call: ScriptedCall) -> Scripted:
    """Every tool of Pi, two calls at once, odd text, and an answer."""
    turns = [
        calls(
            ("bash", {"command": "printf 'one\\ntwo <|im%send|> caf\u00e9\\n' _ > a.txt && cat a.txt"}),
            before="  Let me look.\n\n",
        ),
        calls(("read", {"path": "a.txt"})),
        calls(
            ("edit", {"path": "a.txt", "edits": [{"oldText": "one", "newText": "three"}]}),
            before="Caf\u00e9 \u65e5\u672c \u2028 it is.\n",
        ),
        calls(("write", {"path": "deep/b.txt", "content": "b & <tool_call>\n"}), ("bash", {"command": "sleep 0.1; ls -1"})),
        calls(("bash", {"command": "cat a.txt deep/b.txt", "timeout": 30})),
    ]
    return turns[call.turn] if call.turn < len(turns) else Scripted("Done: the files are written.")


def mini_policy(call: ScriptedCall) -> Scripted:
    """Five commands, then mini-swe-agent's own end."""
    commands = [
        "printf 'three\\ntwo <|im%send|> caf\u00e9\\n' _ > a.txt",
        "cat a.txt",
        "mkdir deep && printf 'b & <tool_call>\\n' > deep/b.txt",
        "ls -1",
        "cat a.txt deep/b.txt",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ]
    return calls(("bash", {"command": commands[call.turn]}), before=f"Step {call.turn}: \u65e5\u672c.\n")


def task(harness: str, samples: int = 2) -> Task:
    return Task(
        id="files",
        instruction="-- Write the files; @mentions and <|im_start|> are only text.",
        harness=HarnessSpec(harness),
        evaluator=EvaluatorSpec("command", "grep -q three a.txt && grep -q tool_call deep/b.txt"),
        samples=samples,
        timeouts=Timeouts(run=120),
    )


async def one_trace_each(
    harness: str, policy: object, sandbox: SandboxChoice, model_dir: Path, out: Path, turns: int
) -> tuple[list[SessionResult], list[Logged]]:
    """Run two samples, and hold store, traces and files against the policy's log."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    engine = ScriptedEngine(tokenizer, policy, model_dir=model_dir)  # type: ignore[arg-type]
    async with scripted_server(engine) as url:
        options = RunOptions(out, url, sandbox=sandbox, concurrency=2)
        results = list((await run_tasks([task(harness)], options, Silent())).results)
    for result in results:
        assert (result.status, result.reward, result.error) == ("completed", 1.0, "")
        assert (result.calls, result.traces, result.findings) == (turns, 1, ())
        assert result.sandbox == sandbox
        captured = read_captured(RunFolder(out).capture, result.session_id)
        (trace,) = build(captured, builder="prefix_merging", status="completed", reward=1.0).traces
        mine = [entry for entry in engine.log if entry.request_id in {call.call_id for call in captured.calls}]
        assert [*trace.prompt_ids, *trace.response_ids] == [*mine[-1].prompt_ids, *mine[-1].ids]
        assert trace.response_ids[trace.loss_mask == 1].tolist() == [token for entry in mine for token in entry.ids]
        assert trace.response_logprobs[trace.loss_mask == 1].tolist() == [value for entry in mine for value in entry.logprobs]
        for before, after in pairwise(mine):
            assert after.prompt_ids[: len(before.prompt_ids) + len(before.ids)] == (*before.prompt_ids, *before.ids)
        workspace = RunFolder(out).session(result.session_id) / "workspace"
        assert (workspace / "a.txt").read_text() == "three\ntwo <|im_end|> caf\u00e9\n"
        assert (workspace / "deep" / "b.txt").read_text() == "b & <tool_call>\n"
    assert sum(result.accounting.trained for result in results) == sum(len(entry.ids) for entry in engine.log)
    check_export(out, engine.log)
    return results, engine.log


def check_export(run: Path, log: list[Logged]) -> None:
    """What `polar export` writes for a trainer, held against the log token for token."""
    exported = CliRunner().invoke(app, ["export", str(run), "--format", "parquet", "--out", str(run / "traces.parquet")])
    assert exported.exit_code == 0, exported.output
    for row in pq.read_table(run / "traces.parquet").to_pylist():
        mine = [entry for entry in log if entry.request_id in row["call_ids"]]
        trained = [place for place, mask in enumerate(row["loss_mask"]) if mask]
        assert row["prompt_ids"] == list(mine[0].prompt_ids)
        assert row["prompt_ids"] + row["response_ids"] == [*mine[-1].prompt_ids, *mine[-1].ids]
        assert [row["response_ids"][place] for place in trained] == [token for entry in mine for token in entry.ids]
        assert [row["response_logprobs"][place] for place in trained] == [value for entry in mine for value in entry.logprobs]
        assert (row["reward"], row["weight"]) == (1.0, 1.0)


@pytest.mark.parametrize("sandbox", ["process", "bubblewrap"])
async def test_pi(sandbox: SandboxChoice, smollm2_dir: Path, tmp_path: Path) -> None:
    _, log = await one_trace_each("pi", pi_policy, sandbox, smollm2_dir, tmp_path / "run", turns=6)
    firsts = {entry.prompt_ids for entry in log if len(entry.prompt_ids) == min(len(e.prompt_ids) for e in log)}
    if sandbox == "bubblewrap":
        assert len(firsts) == 1, "the first prompts of a group are equal where the workspace has one path"


@pytest.mark.heavy
@pytest.mark.parametrize("sandbox", ["process", "bubblewrap"])
async def test_mini_swe_agent(sandbox: SandboxChoice, smollm2_dir: Path, tmp_path: Path) -> None:
    await one_trace_each("mini_swe_agent", mini_policy, sandbox, smollm2_dir, tmp_path / "run", turns=6)
