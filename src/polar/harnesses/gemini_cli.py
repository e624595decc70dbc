"""Gemini CLI (npm `@google/gemini-cli`), a coding agent with files, shell and sub-agents as its tools.

Facts about 0.61.0 that the launch rests on, each seen in its source or in its requests:

- The model's name decides prompt and tools, and `auto` has another model choose: a policy's is unknown to it, which is plain.
- It believes that every unknown model has a window of 1,048,576 tokens, and compacts at a share of that, cutting its history
  before a user's turn: in a session of one instruction there is none, so such a session ends where the window does.
- Thoughts are dropped from its history; tool-call ids are its own; thought signatures come back.
- It asks again after 5xx, for minutes, and after an error event in a stream; a connection that breaks ends it.
- After thirty turns another call would look for loops; that is off.
- Settings of the workspace come after those of the user, as which ours are given: those of the system must be in a directory
  above which nobody but root may write.
- The first prompt holds the date and a listing of the workspace.
"""

from pathlib import Path

from polar.harnesses import slash
from polar.harnesses.npm import NpmPackage, json_text
from polar.harnesses.options import check_options
from polar.harnesses.protocol import Endpoint, Launch, Report, shell_probe
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, KindRule, Task

_PACKAGE = NpmPackage("gemini_cli", "@google/gemini-cli", "0.61.0", ("@google/gemini-cli/bundle/gemini.js", "--version"))
_BELIEVED_WINDOW = 1_048_576
_RESERVE = 16_384  # tokens that are kept free for a reply and a tool's output, in a window that is large enough


class GeminiCli:
    """Gemini CLI at a pinned version, over the Gemini API."""

    name = "gemini_cli"
    version = _PACKAGE.version
    summary = "Gemini CLI: files, shell, sub-agents"
    profile = HarnessProfile(
        "gemini_cli",
        _PACKAGE.version,
        kinds=(KindRule("compaction", system=r"^You are a specialized system component"),),
    )
    probe = shell_probe("run_shell_command")

    def installed(self, cache: Path) -> bool:
        """Whether Gemini CLI and a Node.js for it are there."""
        return _PACKAGE.installed(cache)

    def install(self, cache: Path, report: Report) -> None:
        """Install Gemini CLI, and Node.js if the system's is too old; see `Harness.install`."""
        _PACKAGE.install(cache, report)

    def check(self, spec: HarnessSpec) -> None:
        """Gemini CLI has no options."""
        check_options(spec)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One run that prints events. The instruction is the prompt of a slash command, where nothing in it is an order."""
        runtime = _PACKAGE.runtime(cache)
        model = endpoint.model.rpartition("/")[2]  # a `/` would be another route
        argv = (
            *(str(runtime.node), str(_PACKAGE.program(cache))),
            *("--yolo", "--model", model, "--output-format", "stream-json"),
        )
        environment = {
            "GOOGLE_GEMINI_BASE_URL": endpoint.base_url,
            "GEMINI_API_KEY": endpoint.key,
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            "GEMINI_CLI_NO_RELAUNCH": "true",
        }
        command = Command(argv, environment, slash.LINE, (str(_PACKAGE.target(cache)), *runtime.readable))
        files = {
            ".gemini/settings.json": _settings(endpoint),
            f".gemini/commands/{slash.NAME}.toml": slash.toml_command(task.instruction),
        }
        return Launch(command, files)


def _settings(endpoint: Endpoint) -> str:
    window = endpoint.max_model_len
    limit = window - min(_RESERVE, window // 4)
    return json_text(
        {
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "model": {"compressionThreshold": limit / _BELIEVED_WINDOW, "disableLoopDetection": True},
        }
    )
