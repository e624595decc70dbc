"""Does a harness work here? Its probe is played through the real gateway, and all that it did is held against what was asked.

The policy is a script, so no model is needed: what the harness writes is known beforehand, and so is every token.
"""

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct
from tokenizers import Tokenizer

from polar.engines.scripted import Logged, ScriptedEngine, scripted_server
from polar.errors import PolarError
from polar.harnesses.install import size_text
from polar.harnesses.protocol import Endpoint, Harness, Report
from polar.paths import cache_dir
from polar.rollout.folder import RunFolder
from polar.rollout.observer import Silent
from polar.rollout.probe import differences, play
from polar.rollout.runner import RunOptions, run_tasks
from polar.specs import HarnessSpec, SessionResult, Task, Timeouts
from polar.store.captured import read_captured
from polar.tokens.records import Call
from polar.trajectory.builders import Captured

INSTRUCTION = (
    "Write three files into the current directory: hello.txt with the line `hello`, then one.txt with the line `one` "
    "and two.txt with the line `two`."
)
FILES = {"hello.txt": "hello\n", "one.txt": "one\n", "two.txt": "two\n"}
SECONDS = 300.0  # for the harness; the slowest takes some forty
MAX_MODEL_LEN = 131_072
LONGEST = 300  # characters that are quoted of anything


class Checked(Struct, frozen=True):
    """What was seen of a harness.

    Attributes:
        wrong: what is not as it must be; nothing if the harness is fine.
        size: of what is installed, as text; "" where nothing is.
        dialects: APIs that it spoke; `streamed` says of which of its calls: `yes`, `no` or `some`.
        prompt_tokens: of its first call.
        seconds: how long it ran.
        files: how many of the probe's files are exactly as asked.
        breaks: calls that did not go on from stored ids, by reason.
        kinds: calls by kind.
        unserved: names of what it asked and the policy was not given.
        unknown_routes: what it asked for and nobody serves.
        tool_ids: of the ids that its tool calls were given, how many came back, and how many there were.
        other_ids: other identifiers of ours that came back (signatures, item ids).
        run: folder that the session is kept in where something is wrong, for `polar show`; else "".
    """

    harness: str
    version: str
    wrong: tuple[str, ...] = ()
    size: str = ""
    dialects: tuple[str, ...] = ()
    streamed: str = ""
    calls: int = 0
    prompt_tokens: int = 0
    seconds: float = 0.0
    files: int = 0
    traces: int = 0
    breaks: dict[str, int] = {}
    kinds: dict[str, int] = {}
    unserved: tuple[str, ...] = ()
    unknown_routes: tuple[str, ...] = ()
    tool_ids: tuple[int, int] = (0, 0)
    other_ids: int = 0
    run: str = ""

    @property
    def ok(self) -> bool:
        return not self.wrong

    @property
    def verdict(self) -> str:
        """`ok`, or what is wrong, in one line."""
        return " ".join("; ".join(self.wrong).split()) or "ok"


async def check(name: str, harness: Harness, model_dir: Path, report: Report) -> Checked:
    """Install `harness` if it is not, and play its probe in one session in the best sandbox. Never raises what `harness` did.

    Args:
        name: what `harnesses.get` finds it by.
        model_dir: directory of a ChatML model's tokenizer.
        report: gets a line per step; called from other threads too.
    """
    folder = Path(tempfile.mkdtemp(prefix="polar-check-"))
    try:
        checked = await _check(name, harness, model_dir, folder / "run", report)
    except PolarError as error:
        checked = Checked(harness.name, harness.version, (_quoted(str(error)),))
    except Exception as error:  # of a class that is not ours: the other harnesses are checked all the same
        checked = Checked(harness.name, harness.version, (_quoted(f"its class failed: {_innermost(error)!r}"),))
    if not checked.run:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    return checked


def _innermost(error: Exception) -> Exception:
    return _innermost(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


async def _check(name: str, harness: Harness, model_dir: Path, out: Path, report: Report) -> Checked:
    if not harness.installed(cache_dir()):
        await asyncio.to_thread(harness.install, cache_dir(), report)
    report(f"{harness.name} {harness.version}: playing its probe".replace("  ", " "))
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    engine = ScriptedEngine(tokenizer, play(harness.probe), model_dir=model_dir, max_model_len=MAX_MODEL_LEN)
    task = Task("probe", INSTRUCTION, harness=HarnessSpec(name), timeouts=Timeouts(prepare=60, run=SECONDS))
    last = _Last()
    async with scripted_server(engine) as url:
        try:
            await run_tasks([task], RunOptions(out, url, concurrency=1), last)
        except PolarError:
            if last.result is None:  # else the session says better what happened
                raise
    assert last.result is not None
    size = await asyncio.to_thread(_size, harness, task)
    return await asyncio.to_thread(_look, harness, _Session(out, last.result, engine.log), size)


@dataclass
class _Last(Silent):
    """Keeps the result that a run reports."""

    result: SessionResult | None = field(default=None)

    def finished(self, result: SessionResult) -> None:
        self.result = result


@dataclass(frozen=True)
class _Session:
    """A session that has ended, and what the policy knows of it."""

    out: Path
    result: SessionResult
    log: Sequence[Logged]

    @property
    def workspace(self) -> Path:
        return RunFolder(self.out).session(self.result.session_id) / "workspace"


def _look(harness: Harness, session: _Session, size: str) -> Checked:
    result, captured = session.result, read_captured(RunFolder(session.out).capture, session.result.session_id)
    calls = sorted(captured.calls, key=lambda call: call.ordinal)
    wrong = tuple(map(_quoted, _wrong(harness, session, captured)))
    return Checked(
        harness=harness.name,
        version=harness.version,
        wrong=wrong,
        size=size,
        dialects=tuple(dict.fromkeys(call.dialect for call in calls)),
        streamed={(): "", (False,): "no", (True,): "yes"}.get(tuple({call.stream for call in calls}), "some"),
        calls=len(calls),
        prompt_tokens=calls[0].prompt_tokens if calls else 0,
        seconds=result.timing.running,
        files=len(FILES) - len(list(_wrong_files(session.workspace))),
        traces=result.traces,
        breaks=dict(Counter(call.fork_reason for call in calls if call.fork_reason)),
        kinds=dict(Counter(call.kind for call in calls)),
        unserved=tuple(dict.fromkeys(name for call in calls for name in call.unserved)),
        unknown_routes=tuple(finding.message for finding in result.findings if finding.code == "unknown_route"),
        tool_ids=_tool_ids(calls, captured),
        other_ids=len({minted for message in captured.messages.values() for minted in message.minted}),
        run=str(session.out) if wrong else "",
    )


def _wrong(harness: Harness, session: _Session, captured: Captured) -> Iterator[str]:
    """What is not as it must be; of a session that broke only why."""
    result = session.result
    if result.error:
        yield result.error
        return
    if result.status == "timed_out":
        yield f"it did not end within {SECONDS:g} s"
    answered = sum(call.status == "ok" and call.kind == "agent" for call in captured.calls)
    if answered < len(harness.probe):
        yield f"it got {answered} answers, its probe has {len(harness.probe)}"
    yield from _wrong_files(session.workspace)
    yield from (f"call {call.call_id} {call.status}: {call.error}" for call in captured.calls if call.status != "ok")
    yield from differences(captured, session.log)


def _wrong_files(workspace: Path) -> Iterator[str]:
    for name, wanted in FILES.items():
        path = workspace / name
        if path.is_symlink() or not path.is_file():
            yield f"{name} is missing"
        elif (held := _start(path)) != wanted.encode():
            yield f"{name} holds {held[:40]!r}, not {wanted.encode()!r}"


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(LONGEST)


def _tool_ids(calls: Sequence[Call], captured: Captured) -> tuple[int, int]:
    """Of the ids that tool calls were given, how many came back, and how many there were; those of the last call cannot."""
    given = {each.id for call in calls[:-1] for choice in call.choices for each in choice.message.tool_calls}
    back = {each.id for message in captured.messages.values() for each in message.tool_calls}
    return len(given & back), len(given)


def _size(harness: Harness, task: Task) -> str:
    """Size of what is installed for this harness alone: not Node.js, which several share, and not the system's Python."""
    endpoint = Endpoint("http://127.0.0.1:1/s/key", "key", "policy", MAX_MODEL_LEN)
    ours = cache_dir().absolute() / "harnesses"
    with suppress(PolarError, OSError):
        launch = harness.launch(task, endpoint, cache=cache_dir(), workspace="/workspace", home="/home/agent")
        for path in map(Path, launch.command.readable):
            if path.is_relative_to(ours) and path.is_dir():
                return size_text(path)
    return ""


def _quoted(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
