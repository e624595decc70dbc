"""An expert that does workspace tasks through real harnesses, and what its sessions said.

The expert is a script behind the scripted engine: it knows the story of each task, and calls the harness's own shell tool. The
harness is the real one, so prompts, tools and results are what a policy will see.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs
from tokenizers import Tokenizer

from polar import harnesses
from polar.chat import Message, Tool
from polar.engines.embedded.models import SMOLLM2, resolve
from polar.engines.script import Scripted, ScriptedCall
from polar.engines.scripted import ScriptedEngine, scripted_server
from polar.errors import InfrastructureError
from polar.harnesses.protocol import Turn
from polar.rollout.folder import RunFolder
from polar.rollout.observer import Observer
from polar.rollout.probe import TOOLS, Script, spelled
from polar.rollout.runner import RunOptions, run_tasks
from polar.specs import HarnessSpec
from polar.store.captured import read_captured
from polar.tasks.workspace import Story, stories, workspace_tasks
from polar.trajectory.builders import Captured

FINAL = "Done."
ENDS = {"mini_swe_agent": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}  # harnesses that end by a command
MAX_MODEL_LEN = 131_072


@dataclass(frozen=True)
class Dialogue:
    """What an agent was shown and said, from the first message to the last answer."""

    harness: str
    story: Story
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]


async def dialogues(harness: str, count: int, out: Path, observer: Observer, concurrency: int = 4) -> list[Dialogue]:
    """Have the expert do `count` training tasks through `harness`; the sessions that earned their reward.

    Raises:
        InfrastructureError: none did.
    """
    told = stories("train", count)
    tasks = [structs.replace(task, harness=HarnessSpec(harness)) for task in workspace_tasks(f"workspace:train:{count}")]
    model = resolve(SMOLLM2)
    engine = ScriptedEngine(
        Tokenizer.from_file(str(model / "tokenizer.json")), _script(harness, told), model_dir=model, max_model_len=MAX_MODEL_LEN
    )
    async with scripted_server(engine) as url:
        summary = await run_tasks(tasks, RunOptions(out, url, concurrency=concurrency), observer)
    by_task = dict(zip((task.id for task in tasks), told, strict=True))
    found = [
        _dialogue(harness, by_task[result.task_id], read_captured(RunFolder(out).capture, result.session_id))
        for result in summary.results
        if result.reward == 1
    ]
    if not found:
        raise InfrastructureError(f"the expert did none of {count} tasks through {harness}: `polar show {out}` says why")
    return found


def _script(harness: str, told: Sequence[Story]) -> Script:
    tool, arguments = harnesses.get(harness).probe[0].calls[0]
    name = next(iter(arguments))
    last = (ENDS[harness],) if harness in ENDS else ()

    def reply(call: ScriptedCall) -> Scripted:
        known = next((each for each in told if each.instruction in call.prompt_text), None)
        steps = (*known.steps, *last) if known and TOOLS in call.prompt_text else ()
        if call.turn >= len(steps):
            return Scripted(FINAL, canonical=True)
        return Scripted(spelled(Turn("", ((tool, {**arguments, name: steps[call.turn]}),))), canonical=True)

    return reply


def _dialogue(harness: str, told: Story, captured: Captured) -> Dialogue:
    last = max((call for call in captured.calls if call.kind == "agent" and call.status == "ok"), key=lambda call: call.ordinal)
    said = tuple(captured.messages[digest] for digest in last.message_hashes)
    return Dialogue(harness, told, (*said, last.choices[0].message), captured.tools[last.tools_hash])
