"""Qwen Code (npm `@qwen-code/qwen-code`), a coding agent with files, shell and sub-agents as its tools.

Facts about 0.24.4 that the launch rests on, each seen in its source or in its requests:

- It writes nothing about itself on the wire: its sub-agents, which work in the background, differ by their system prompts.
- After an answer it would have the policy extract "memories" from the conversation, and put the empty memory's paths into every
  prompt; so its memory is off.
- It plans with `contextWindowSize` and the tokens that a reply reports, and compacts when fewer than 33,000 tokens are free: in a
  small window it would do nothing else. So it is told of a larger one, in which that point is where it should be.
- Its first prompt has some 18,000 tokens.
- It compacts after a request that was too long, too. It asks again after 5xx and broken connections, but not after an error event
  that comes behind some text: that ends it.
- After a compaction its reminders come back one turn late, in front of the summary: its history forks there once more.
- Settings of the workspace come after those of the user, and before those of the system; ours must hold, so they are the latter.
"""

from pathlib import Path

from polar.harnesses import slash
from polar.harnesses.npm import NpmPackage, json_text
from polar.harnesses.options import check_options
from polar.harnesses.protocol import Endpoint, Launch, Report, shell_probe
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, KindRule, Task

_PROGRAM = "@qwen-code/qwen-code/cli.js"
_PATIENCE = 1_800_000  # milliseconds; the gateway answers slow requests with headers and keep-alives
_KEPT_FREE = 33_000  # tokens below which it compacts
_RESERVE = 16_384  # tokens that should be kept free for a reply and a tool's output, in a window that is large enough
_OUTPUT = 32_000  # tokens that Qwen Code asks for of its own accord


def _finish(target: Path) -> None:
    """npm packs ripgrep without its executable bit; without it Qwen Code says so in every run, and searches with less."""
    for program in (target / "node_modules" / "@qwen-code" / "qwen-code" / "vendor" / "ripgrep").glob("*/rg"):
        program.chmod(0o755)


_PACKAGE = NpmPackage("qwen_code", "@qwen-code/qwen-code", "0.24.4", (_PROGRAM, "--version"), _finish)


class QwenCode:
    """Qwen Code at a pinned version, over the Chat Completions API."""

    name = "qwen_code"
    version = _PACKAGE.version
    summary = "Qwen Code: files, shell, sub-agents"
    profile = HarnessProfile(
        "qwen_code",
        _PACKAGE.version,
        kinds=(
            KindRule("compaction", system=r"^You are the component that summarizes a conversation"),
            KindRule("compaction", last=r"You are the component that summarizes a conversation|<state_snapshot>"),
        ),
    )
    probe = shell_probe("run_shell_command", is_background=False)

    def installed(self, cache: Path) -> bool:
        """Whether Qwen Code and a Node.js for it are there."""
        return _PACKAGE.installed(cache)

    def install(self, cache: Path, report: Report) -> None:
        """Install Qwen Code, and Node.js if the system's is too old; see `Harness.install`."""
        _PACKAGE.install(cache, report)

    def check(self, spec: HarnessSpec) -> None:
        """Qwen Code has no options."""
        check_options(spec)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One run that prints events. The instruction is the prompt of a slash command, where nothing in it is an order."""
        runtime = _PACKAGE.runtime(cache)
        argv = (str(runtime.node), str(_PACKAGE.program(cache)), "--yolo", "--output-format", "stream-json")
        environment = {
            "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
            "OPENAI_API_KEY": endpoint.key,
            "OPENAI_MODEL": endpoint.model,
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": f"{home}/qwen/settings.json",
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            "QWEN_CODE_NO_RELAUNCH": "true",
            "QWEN_STREAM_MAX_LIFETIME_MS": str(_PATIENCE),
        }
        command = Command(argv, environment, slash.LINE, (str(_PACKAGE.target(cache)), *runtime.readable))
        files = {
            "qwen/settings.json": _settings(task, endpoint),
            f".qwen/commands/{slash.NAME}.md": slash.markdown_command(task.instruction),
        }
        return Launch(command, files)


def _settings(task: Task, endpoint: Endpoint) -> str:
    window = endpoint.max_model_len
    generation = {
        "contextWindowSize": window + _KEPT_FREE - min(_RESERVE, window // 4),
        "samplingParams": {"max_tokens": task.sampling.max_tokens or min(_OUTPUT, window // 4)},
        "timeout": _PATIENCE,
    }
    return json_text(
        {
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
            "security": {"auth": {"selectedType": "openai"}, "folderTrust": {"enabled": False}},
            "model": {"generationConfig": generation},
        }
    )
