"""mini-swe-agent (PyPI), an agent with one tool, `bash`, in a few hundred lines.

Facts about 2.4.6: it asks without streaming; a turn without a tool call is dropped from its history; it ends when a
command prints `COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`, and with exit status 0 also after three malformed turns in a row.
Its prompt names the kernel (`uname`), so prompts are equal on one machine and not across machines.
"""

import os.path
import re
from pathlib import Path

import msgspec

from polar.errors import UsageError
from polar.harnesses.options import check_options
from polar.harnesses.protocol import Endpoint, Launch, Report, Turn, shell_probe
from polar.harnesses.venv import PythonPackage
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, Task

_PACKAGE = PythonPackage(
    "mini_swe_agent",
    "mini-swe-agent",
    "2.4.6",
    "import minisweagent.agents",
    "some 750 MB, most of it dependencies that it imports, a minute or more",
)
_END = Turn("Done.", (("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),))


class MiniSweAgent:
    """mini-swe-agent at a pinned version with pinned dependencies, in a virtual environment of its own."""

    name = "mini_swe_agent"
    version = _PACKAGE.version
    summary = "mini-swe-agent: bash as its only tool"
    profile = HarnessProfile("mini_swe_agent", _PACKAGE.version)
    probe = (*shell_probe("bash")[:2], _END)

    def installed(self, cache: Path) -> bool:
        """Whether its virtual environment is complete."""
        return _PACKAGE.installed(cache)

    def install(self, cache: Path, report: Report) -> None:
        """Make the virtual environment; see `Harness.install`."""
        _PACKAGE.install(cache, report)

    def check(self, spec: HarnessSpec) -> None:
        """mini-swe-agent has no options."""
        check_options(spec)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One run without questions. The instruction is in a configuration file, where it may have any length and form."""
        target = _PACKAGE.target(cache)
        builtin = _PACKAGE.site_packages(target) / "minisweagent" / "config" / "mini.yaml"
        if "=" in str(builtin):
            raise UsageError(f"mini_swe_agent reads a path with `=` as a setting: set POLAR_CACHE to one without ({cache})")
        own = os.path.relpath(f"{home}/mini/task.yaml", workspace)  # relative, for the same reason
        argv = (
            # -I: the workspace must not shadow what the agent imports. -u: a log is worth most when the run was killed.
            *(str(_PACKAGE.interpreter(target)), "-I", "-u", "-m", "minisweagent"),
            *("--yolo", "--exit-immediately", "--model", f"openai/{endpoint.model}"),
            *("--config", str(builtin), "--config", own),
        )
        environment = {
            "OPENAI_API_BASE": f"{endpoint.base_url}/v1",
            "OPENAI_API_KEY": endpoint.key,
            "MSWEA_GLOBAL_CONFIG_DIR": f"{home}/mini",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_MODE": "PRODUCTION",  # else it looks for `.env` files
        }
        settings = {"run": {"task": task.instruction}, "agent": {"cost_limit": 0}}
        return Launch(Command(argv, environment, readable=_PACKAGE.readable(target)), {"mini/task.yaml": _yaml(settings)})


def _yaml(data: object) -> str:
    """JSON that YAML reads as the same data: raw, it would refuse or fold some characters that JSON leaves as they are."""
    text = msgspec.json.encode(data).decode()
    return re.sub(r"[^\x20-\x7e]", lambda found: f"\\U{ord(found[0]):08x}", text)
