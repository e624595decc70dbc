"""Claude Code (npm `@anthropic-ai/claude-code`), one native program with the tools Bash, Edit and Read, and many more.

Facts about 2.1.332 that the launch rests on, each seen in its requests or in its source:

- `tools: bare` (`--bare`) sends 4 thousand characters before the instruction: three tools, a system prompt with little more
  than the working directory and the date, no `CLAUDE.md`. `default` sends 48 thousand, some 12,000 tokens, adds `Write`,
  sub-agents, skills, workflows and reminders, and system messages in mid-conversation. Bare is the default here: it is what
  a small model and a small window can carry.
- Sub-agents (`Agent`) work in the background unless that is disabled: then the parent waits for them, and goes on once.
  `background: on` leaves it to Claude Code, which wakes the parent with a new user turn for each child.
- A window that it does not know is 1,000,000 tokens. It compacts 13,000 tokens and a reply (20,000 at most) before the end of
  the window that it was told of: in a small one it would compact for ever. So it is told of as much more as keeps a quarter
  free; the gateway, which counts exactly, keeps the bound.
- A prompt that does not fit is compacted, without its oldest turns if need be. The newest has to fit, so in a small window
  a tool prints less; Claude Code puts the whole of a longer output into a file, and shows its beginning.
- A reply that ends for its length is continued up to three times, so it has to know the task's own limit.
- A stream that breaks off after some text is asked for again in one piece, once. Without that (there is a switch) the session
  would end. One that breaks off before is asked for again as it was.
- An instruction that starts with `/` may be a command of its own; after a newline it is text. `@file` in an instruction would
  paste that file.
- Root may skip permissions only where `IS_SANDBOX` says so.
"""

from pathlib import Path

from polar.harnesses.npm import NpmPackage, place_native
from polar.harnesses.options import check_options, chosen
from polar.harnesses.protocol import Endpoint, Launch, Report, shell_probe
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, KindRule, Task

_CHOICES = {"tools": ("bare", "default"), "background": ("off", "on")}
_NATIVE = "@anthropic-ai/claude-code-*/claude"  # of the one optional package that fits this machine
_PROGRAM = "@anthropic-ai/claude-code/bin/claude.exe"  # on every system


def _place_program(directory: Path) -> None:
    """What the package's own `install.cjs` does: the program takes the place of a stub."""
    place_native("claude_code", directory, _NATIVE, _PROGRAM)


_PACKAGE = NpmPackage("claude_code", "@anthropic-ai/claude-code", "2.1.332", (_PROGRAM, "--version"), _place_program)
_COMPACTS_BEFORE_END = 13_000  # tokens, plus those of a reply, `_REPLY` at most
_REPLY = 20_000
_MAX_OUTPUT = 32_000  # tokens of a reply that Claude Code asks for by itself
_BASH_OUTPUT, _READ_OUTPUT = 30_000, 25_000  # characters and tokens of a tool's output: Claude Code's own limits


class ClaudeCode:
    """Claude Code at a pinned version, over the Messages API."""

    name = "claude_code"
    version = _PACKAGE.version
    summary = "Claude Code: Bash, Edit, Read, and with `tools: default` sub-agents and more"
    profile = HarnessProfile(
        "claude_code",
        _PACKAGE.version,
        normalisers=("claude_code_attribution",),  # for programs started by hand; `launch` turns the header off
        kinds=(
            KindRule("compaction", last=r"CRITICAL: Respond with TEXT ONLY"),
            KindRule("subagent", header="x-claude-code-agent-id"),
        ),
    )
    probe = shell_probe("Bash")

    def installed(self, cache: Path) -> bool:
        """Whether Claude Code, and the Node.js that npm needs, are there."""
        return _PACKAGE.installed(cache)

    def install(self, cache: Path, report: Report) -> None:
        """Install Claude Code, and Node.js for npm if the system's is too old; see `Harness.install`."""
        _PACKAGE.install(cache, report)

    def check(self, spec: HarnessSpec) -> None:
        """`tools` is `bare` (the default) or `default`, `background` is `off` (the default) or `on`."""
        check_options(spec, choices=_CHOICES)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One run that prints events; the instruction goes to standard input, where nothing in it can be taken for an option."""
        bare = ("--bare",) if chosen(task.harness, "tools", _CHOICES) == "bare" else ()
        argv = (
            *(str(_PACKAGE.program(cache)), "--print", "--output-format", "stream-json", "--verbose"),
            *("--model", endpoint.model, "--dangerously-skip-permissions", "--no-session-persistence", *bare),
        )
        instruction = f"\n{task.instruction}" if task.instruction.startswith("/") else task.instruction
        return Launch(Command(argv, _environment(task, endpoint, home), instruction, (str(_PACKAGE.target(cache)),)))


def _environment(task: Task, endpoint: Endpoint, home: str) -> dict[str, str]:
    output = task.sampling.max_tokens
    waits = {} if chosen(task.harness, "background", _CHOICES) == "on" else {"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1"}
    return {
        "ANTHROPIC_BASE_URL": endpoint.base_url,
        "ANTHROPIC_API_KEY": endpoint.key,
        "CLAUDE_CONFIG_DIR": f"{home}/claude",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(_told_window(endpoint.max_model_len, output or _MAX_OUTPUT)),
        **({"CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(output)} if output else {}),
        "BASH_MAX_OUTPUT_LENGTH": str(min(_BASH_OUTPUT, endpoint.max_model_len // 2)),
        "CLAUDE_CODE_FILE_READ_MAX_OUTPUT_TOKENS": str(min(_READ_OUTPUT, endpoint.max_model_len // 8)),
        "CLAUDE_CODE_SUBAGENT_MODEL": endpoint.model,  # some kinds of sub-agents would ask for another
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_FILE_MENTIONS": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "IS_SANDBOX": "1",
        **waits,
    }


def _told_window(window: int, output: int) -> int:
    """The window to speak of, so that compaction begins a quarter of the real one before its end, or earlier."""
    margin = min(output, _REPLY) + _COMPACTS_BEFORE_END
    return window + margin - min(margin, window // 4)
