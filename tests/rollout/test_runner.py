"""Runs from end to end with a scripted policy: what is scored, what survives, what is said when things break."""

import asyncio
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from polar.engines.scripted import Scripted, ScriptedCall
from polar.errors import EngineError, InfrastructureError, UsageError
from polar.rollout.folder import RunFolder
from polar.rollout.observer import Silent
from polar.rollout.runner import PREPARED_AHEAD, RunOptions, run_tasks
from polar.specs import HarnessSpec, SessionResult, Stage, Timeouts
from polar.store.captured import read_captured
from polar.store.ledger import Ledger, LedgerReader
from polar.trajectory.builders import build
from tests.rollout.conftest import Policy, Watching, agent_task, write_and_answer


async def test_sessions_are_run_scored_and_accounted_for(policy: Policy) -> None:
    watching = Watching()
    async with policy() as (engine, options):
        summary = await run_tasks([agent_task("a"), agent_task("b")], options, watching)
    assert [(r.task_id, r.sample, r.status, r.reward, r.calls, r.traces) for r in summary.results] == [
        (task, sample, "completed", 1.0, 2, 1) for task in "ab" for sample in (0, 1)
    ]
    assert sum(r.accounting.trained for r in summary.results) == sum(len(entry.ids) for entry in engine.log)
    for result in summary.results:
        stages = [stage for session_id, stage in watching.stages if session_id == result.session_id]
        assert stages == ["preparing", "ready", "running", "scoring"]
        assert result.timing.running > 0
        folder = RunFolder(options.out)
        assert (folder.session(result.session_id) / "workspace" / "made.txt").read_text() == "42\n"
        assert not (folder.session(result.session_id) / "workspace" / "want").exists()
        captured = read_captured(folder.capture, result.session_id)
        (trace,) = build(captured, builder="prefix_merging", status="completed", reward=1.0).traces
        assert any([*e.prompt_ids, *e.ids] == [*trace.prompt_ids, *trace.response_ids] for e in engine.log)


async def test_a_finished_run_has_nothing_left_to_do(policy: Policy) -> None:
    async with policy() as (engine, options):
        first = await run_tasks([agent_task()], options, Silent())
        calls = len(engine.log)
        watching = Watching()
        second = await run_tasks([agent_task()], options, watching)
    assert (watching.plan, len(engine.log)) == ((2, 2), calls)
    assert second == first


async def test_a_stopped_run_goes_on_where_it_was(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = asyncio.Event()
    finish = Ledger.finish

    async def slowly(ledger: Ledger, result: SessionResult) -> None:
        await asyncio.sleep(0.3 * result.sample)  # the others have ended by then, and nothing may cancel this one again
        await finish(ledger, result)

    monkeypatch.setattr(Ledger, "finish", slowly)

    def script(call: ScriptedCall) -> Scripted:
        return Scripted("Wait.", hold_before_end=hold) if "slow" in call.prompt_text else write_and_answer(call)

    tasks = [agent_task("quick"), agent_task("slow", instruction="slow")]
    watching = Watching()
    async with policy(script) as (engine, options):
        running = asyncio.create_task(run_tasks(tasks, options, watching))
        async with asyncio.timeout(60):
            while len(watching.results) < 2 or sum(entry.finish == "" for entry in engine.log) < 2:
                await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with closing(LedgerReader.open(RunFolder(options.out).ledger)) as ledger:
            ended = {(s.task_id, s.sample): s.result for s in ledger.sessions()}
        assert {key: result.status for key, result in ended.items() if result} == {
            ("quick", 0): "completed", ("quick", 1): "completed", ("slow", 0): "cancelled", ("slow", 1): "cancelled",
        }  # fmt: skip
        cancelled = [result for result in ended.values() if result and result.status == "cancelled"]
        assert all(r.accounting.holds and r.accounting.excluded == {"aborted": r.accounting.sampled} for r in cancelled)
        hold.set()
        again = Watching()
        summary = await run_tasks(tasks, options, again)
    assert again.plan == (4, 2)
    assert [r.status for r in summary.results] == ["completed"] * 4
    assert {r.session_id for r in summary.results if r.task_id == "quick"} == {r.session_id for r in watching.results[:2]}


async def test_a_harness_that_never_calls_the_model_is_an_error_by_name(policy: Policy) -> None:
    async with policy() as (_, options):
        summary = await run_tasks([agent_task(mode="silent", samples=1), agent_task("fine", samples=1)], options, Silent())
    silent, fine = summary.results
    assert (silent.status, silent.error_kind, silent.reward) == ("failed", "no_model_calls", None)
    assert "ended with status 3 without a model call" in silent.error
    assert "I have nothing to say" in silent.error
    assert fine.reward == 1.0


async def test_a_run_in_which_no_harness_calls_the_model_is_stopped(policy: Policy) -> None:
    watching = Watching()
    async with policy() as (_, options):
        with pytest.raises(InfrastructureError, match="no session called the model"):
            await run_tasks([agent_task(mode="silent", samples=40)], options, watching)
    assert len(watching.results) < 20


async def test_a_crashed_harness_is_no_zero(policy: Policy) -> None:
    async with policy() as (_, options):
        (result,) = (await run_tasks([agent_task(mode="crash", samples=1)], options, Silent())).results
    assert (result.status, result.reward, result.error_kind) == ("failed", None, "harness_crash")
    assert "signal 11" in result.error
    assert "out of cheese" in result.error
    assert result.accounting.excluded == {"no_reward": result.accounting.sampled}


async def test_an_exit_status_is_noted_and_is_no_verdict(policy: Policy) -> None:
    async with policy() as (_, options):
        (result,) = (await run_tasks([agent_task(mode="fail", samples=1)], options, Silent())).results
    assert (result.status, result.reward) == ("completed", 1.0)
    assert [finding.code for finding in result.findings] == ["harness_exit"]


async def test_a_timeout_keeps_what_was_captured_and_is_scored(policy: Policy) -> None:
    async with policy() as (_, options):
        task = agent_task(mode="sleep", samples=1, timeouts=Timeouts(run=4))
        (result,) = (await run_tasks([task], options, Silent())).results
    assert (result.status, result.reward, result.calls) == ("timed_out", 1.0, 2)


async def test_an_engine_that_is_down_says_so_before_anything_starts(policy: Policy) -> None:
    async with policy() as (_, options):
        down = RunOptions(options.out, "http://127.0.0.1:9", sandbox="process")
        with pytest.raises(EngineError, match="no engine answers at http://127.0.0.1:9"):
            await run_tasks([agent_task()], down, Silent())


async def test_an_engine_fault_costs_the_session_its_reward_and_is_tried_again(policy: Policy) -> None:
    broken = True

    def script(call: ScriptedCall) -> Scripted:
        return Scripted("Never mind.", fault="http_500") if broken and call.turn else write_and_answer(call)

    async with policy(script) as (_, options):
        (failed,) = (await run_tasks([agent_task(samples=1)], options, Silent())).results
        assert (failed.status, failed.error_kind, failed.reward) == ("failed", "EngineError", None)
        broken = False
        (done,) = (await run_tasks([agent_task(samples=1)], options, Silent())).results
    assert (done.status, done.reward) == ("completed", 1.0)
    assert done.session_id != failed.session_id


async def test_changed_tasks_do_not_mix_with_an_old_run(policy: Policy) -> None:
    async with policy() as (_, options):
        await run_tasks([agent_task(samples=1)], options, Silent())
        with pytest.raises(UsageError, match="instruction"):
            await run_tasks([agent_task(samples=1, instruction="Something else.")], options, Silent())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"harness": HarnessSpec("pie")}, "there is no harness 'pie'.*did you mean 'pi'"),
        ({"harness": HarnessSpec("pi", {"colour": "red"})}, "colour"),
    ],
)
async def test_what_cannot_work_is_refused_before_the_engine_starts(policy: Policy, change: dict[str, object], says: str) -> None:
    async with policy() as (_, options):
        with pytest.raises(UsageError, match=says):
            await run_tasks([agent_task(**change)], RunOptions(options.out, "embedded"), Silent())  # type: ignore[arg-type]
    assert not RunFolder(options.out).capture.exists()


async def test_a_refused_request_is_noted_and_costs_the_reward_when_it_was_the_last(policy: Policy) -> None:
    async with policy() as (_, options):
        (result,) = (await run_tasks([agent_task(mode="refused", samples=1)], options, Silent())).results
    assert (result.status, result.reward, result.error_kind) == ("failed", None, "request_refused")
    assert "messages[0].content[0].image_url" in result.error
    assert "request_refused" in [finding.code for finding in result.findings]


async def test_a_first_prompt_that_does_not_fit_is_named(policy: Policy) -> None:
    async with policy(max_model_len=100) as (_, options):
        (result,) = (await run_tasks([agent_task(samples=1)], options, Silent())).results
    assert (result.status, result.error_kind) == ("failed", "context_length_exceeded")


async def test_the_answer_is_the_agents_not_a_side_calls(policy: Policy) -> None:
    def script(call: ScriptedCall) -> Scripted:
        return Scripted("A fine title") if "title" in call.prompt_text else write_and_answer(call)

    async with policy(script) as (_, options):
        (result,) = (await run_tasks([agent_task(mode="side", samples=1)], options, Silent())).results
    assert (result.reward, result.calls) == (1.0, 3)


async def test_no_key_is_left_in_what_a_harness_printed(policy: Policy) -> None:
    async with policy() as (_, options):
        (result,) = (await run_tasks([agent_task(mode="leak", samples=1)], options, Silent())).results
    assert "(model key)" in result.error
    assert "pk-" not in result.error + (RunFolder(options.out).session(result.session_id) / "harness.err").read_text()


async def test_no_password_of_an_engine_or_a_route_is_stored_or_told(policy: Policy) -> None:
    def script(call: ScriptedCall) -> Scripted:
        return Scripted("Never mind.", fault="http_500") if call.turn else write_and_answer(call)

    watching = Watching()
    async with policy(script) as (_, options):
        url, guarded = options.engine, options.engine.replace("http://", "http://polar:s3cret@")
        options = RunOptions(options.out, guarded, sandbox="process", routes={"other": guarded})
        (failed,) = (await run_tasks([agent_task(samples=1)], options, watching)).results
    assert url in failed.error
    with closing(LedgerReader.open(RunFolder(options.out).ledger)) as ledger:
        assert (ledger.meta()["engine"], ledger.meta()["routes"]) == (url, f"other={url}")
    stored = b"".join(path.read_bytes() for path in options.out.rglob("*") if path.is_file())
    assert b"s3cret" not in stored
    assert "s3cret" not in "".join(watching.notes)


async def test_only_so_many_sessions_are_prepared_ahead(policy: Policy) -> None:
    class Counting(Watching):
        most = 0

        def stage(self, session_id: str, task_id: str, sample: int, stage: Stage) -> None:
            super().stage(session_id, task_id, sample, stage)
            ready = {session for session, reached in self.stages if reached == "ready"}
            ran = {session for session, reached in self.stages if reached == "running"}
            self.most = max(self.most, len(ready - ran))

    watching = Counting()
    async with policy() as (_, options):
        one = RunOptions(options.out, options.engine, sandbox="process", concurrency=1)
        await run_tasks([agent_task(samples=14)], one, watching)
    assert watching.most <= 1 + PREPARED_AHEAD


async def test_an_interrupted_run_does_not_go_on_with_another_vocabulary(
    policy: Policy, smollm2_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(smollm2_dir / "tokenizer_config.json", other)
    text = (smollm2_dir / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text + " ")
    async with policy() as (_, options):
        await run_tasks([agent_task(mode="crash", samples=1)], options, Silent())
        changed = RunOptions(options.out, options.engine, str(other), "process")
        with pytest.raises(UsageError, match="was run with renderer"):
            await run_tasks([agent_task(mode="crash", samples=1)], changed, Silent())


async def test_a_folder_that_cannot_be_made_is_named(policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with policy() as (_, options):
        with pytest.raises(UsageError, match="--out .*file/run: Not a directory"):
            await run_tasks([agent_task()], RunOptions(tmp_path / "file" / "run", options.engine), Silent())
