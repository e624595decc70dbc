"""Mistral Vibe (PyPI `mistral-vibe`), a coding agent; its program is native, behind a server in Python.

Facts about 3.0.2:

- It sends histories back as they were, to the letter.
- It asks for as many tokens as it believes are left in the window; what it would reserve is left to the gateway, which counts
  exactly. At four fifths of the window it compacts, by a call of its own, and it refuses to start where these do not hold its own
  prompt and tools, some 8,500 tokens.
- It takes the instruction from a file, whatever it starts with, and looks no name up.
- Left alone it would report what it does, ask for experiments, titles, connectors and updates: all of that is turned off.
"""

from pathlib import Path

import msgspec

from polar.harnesses.options import check_options
from polar.harnesses.protocol import Endpoint, Launch, Report, shell_probe
from polar.harnesses.venv import PythonPackage
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, KindRule, Task

_PACKAGE = PythonPackage(
    "mistral_vibe",
    "mistral-vibe",
    "3.0.2",
    "import vibe.app_server.stdio",
    "some 400 MB, a minute or less",
    python=(3, 12),
)
_COMPACTING = r"\ACRITICAL: Respond with text only\.[^\n]*\n+You are performing a CONTEXT CHECKPOINT COMPACTION\."


class MistralVibe:
    """Mistral Vibe at a pinned version with pinned dependencies, in a virtual environment of its own."""

    name = "mistral_vibe"
    version = _PACKAGE.version
    summary = "Mistral Vibe: bash, files, tools in TypeScript"
    profile = HarnessProfile("mistral_vibe", _PACKAGE.version, kinds=(KindRule("compaction", last=_COMPACTING),))
    probe = shell_probe("bash")

    def installed(self, cache: Path) -> bool:
        """Whether its virtual environment is complete."""
        return _PACKAGE.installed(cache)

    def install(self, cache: Path, report: Report) -> None:
        """Make the virtual environment; see `Harness.install`."""
        _PACKAGE.install(cache, report)

    def check(self, spec: HarnessSpec) -> None:
        """Mistral Vibe has no options."""
        check_options(spec)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One run without a screen. The instruction is in a file, where it may have any length and form."""
        target = _PACKAGE.target(cache)
        argv = (
            *_PACKAGE.script(target, "vibe"),
            *("--auto-approve", "--trust", "--output", "streaming", "--prompt-file", f"{home}/vibe/task.txt"),
        )
        environment = {"VIBE_HOME": f"{home}/vibe", "POLAR_API_KEY": endpoint.key}
        files = {"vibe/config.toml": _config(endpoint), "vibe/task.txt": task.instruction}
        return Launch(Command(argv, environment, readable=_PACKAGE.readable(target)), files)


def _config(endpoint: Endpoint) -> str:
    return f"""\
active_model = "policy"
enable_telemetry = false
enable_update_checks = false
enable_auto_update = false
enable_notifications = false
enable_connectors = false
output_token_reserve = 0

[experiments]
enable = false

[session_logging]
generate_titles = false

[[providers]]
name = "polar"
api_base = {_text(endpoint.base_url + "/v1")}
api_key_env_var = "POLAR_API_KEY"
api_style = "openai"
backend = "generic"

[[models]]
name = {_text(endpoint.model)}
provider = "polar"
alias = "policy"
max_context_length = {endpoint.max_model_len}
"""


def _text(value: str) -> str:
    """A string as TOML: JSON's is one."""
    return msgspec.json.encode(value).decode()
