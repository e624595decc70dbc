"""Hermes Agent (PyPI `hermes-agent`), an agent with a terminal, files, memory, skills and sub-agents.

Facts about 0.19.0:

- It finds out what server it talks to, at `/api/v1/models`, `/api/tags`, `/v1/props`, `/props` and `/version`; it takes the
  gateway's 404 for an answer, and speaks Chat Completions.
- Its history has a reply's text without whitespace around it, no reasoning, and the arguments with sorted keys.
- It refuses windows below 64,000 tokens, so a smaller one is told as that. It asks for as many tokens as it thinks the window
  has; the gateway, which counts exactly, keeps the bound, and a prompt that is too long makes it compact.
- Its tools have limits of their own: a command may take 600 s, and longer is an error.
- It prints the last answer only. Exit status 1 is one that is empty.
- It compacts by a call of its own when half of the window is used.
- It believes a note that it is up to date, and looks no name up then; titles of conversations are turned off.
"""

from pathlib import Path

from polar.harnesses.arguments import as_argument
from polar.harnesses.npm import json_text
from polar.harnesses.options import check_options
from polar.harnesses.protocol import Endpoint, Launch, Report, shell_probe
from polar.harnesses.venv import PythonPackage
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, KindRule, Task

_PACKAGE = PythonPackage("hermes", "hermes-agent", "0.19.0", "import hermes_cli.oneshot", "some 230 MB, half a minute or more")
_SUMMARISING = r"\AYou are a summarization agent creating a context checkpoint\."
_LEAST_WINDOW = 64_000  # tokens
_NEVER = 4_102_444_800  # unix seconds, in the year 2100


class Hermes:
    """Hermes Agent at a pinned version with pinned dependencies, in a virtual environment of its own."""

    name = "hermes"
    version = _PACKAGE.version
    summary = "Hermes Agent: terminal, files, memory, skills, sub-agents"
    profile = HarnessProfile(
        "hermes",
        _PACKAGE.version,
        normalisers=("trim_text",),
        kinds=(KindRule("compaction", last=_SUMMARISING, tools="none"),),
    )
    probe = shell_probe("terminal")

    def installed(self, cache: Path) -> bool:
        """Whether its virtual environment is complete."""
        return _PACKAGE.installed(cache)

    def install(self, cache: Path, report: Report) -> None:
        """Make the virtual environment; see `Harness.install`."""
        _PACKAGE.install(cache, report)

    def check(self, spec: HarnessSpec) -> None:
        """Hermes Agent has no options."""
        check_options(spec)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One answer, then the end. The instruction is the value of an option, where nothing in it can be taken for one."""
        target = _PACKAGE.target(cache)
        argv = (*_PACKAGE.script(target, "hermes"), "--yolo", f"--oneshot={as_argument(task)}")
        environment = {"HERMES_HOME": f"{home}/hermes"}
        files = {
            "hermes/config.yaml": json_text(_config(endpoint)),  # JSON is YAML
            "hermes/.update_check": json_text({"ts": _NEVER, "behind": 0, "rev": None, "ver": self.version}),
        }
        return Launch(Command(argv, environment, readable=_PACKAGE.readable(target)), files)


def _config(endpoint: Endpoint) -> dict[str, object]:
    window = max(endpoint.max_model_len, _LEAST_WINDOW)
    return {
        "model": {
            "provider": "custom",
            "default": endpoint.model,
            "base_url": f"{endpoint.base_url}/v1",
            "api_key": endpoint.key,
            "context_length": window,
        },
        "auxiliary": {"title_generation": {"enabled": False}, "compression": {"context_length": window}},
        "security": {"allow_lazy_installs": False},
    }
