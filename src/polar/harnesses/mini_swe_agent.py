"""mini-swe-agent (PyPI), an agent with one tool, `bash`, in a few hundred lines.

Facts about 2.4.6: it asks without streaming; a turn without a tool call is dropped from its history; it ends when a
command prints `COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`, and with exit status 0 also after three malformed turns in a row.
Its prompt names the kernel (`uname`), so prompts are equal on one machine and not across machines.
"""

import os.path
import re
import sys
from importlib import resources
from pathlib import Path

import msgspec

from polar.errors import UsageError
from polar.harnesses.install import install_once, is_complete, pip_install, recipe_digest, run_tool, size_text
from polar.harnesses.options import check_options
from polar.harnesses.protocol import Endpoint, Launch, Report
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, Task

_PACKAGE = "mini-swe-agent"
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


class MiniSweAgent:
    """mini-swe-agent at a pinned version with pinned dependencies, in a virtual environment of its own."""

    name = "mini_swe_agent"
    version = "2.4.6"
    summary = "mini-swe-agent: bash as its only tool"
    profile = HarnessProfile("mini_swe_agent", "2.4.6")

    def installed(self, cache: Path) -> bool:
        """Whether its virtual environment is complete."""
        return is_complete(self._target(cache))

    def install(self, cache: Path, report: Report) -> None:
        """Make the virtual environment (750 MB, most of it dependencies that it imports); see `Harness.install`."""

        def build(directory: Path) -> None:
            what = f"installing mini_swe_agent {self.version}"
            report(f"{what} from PyPI: some 750 MB, a minute or more")
            # Without pip, which a system's Python cannot always put into an environment; ours installs from outside.
            run_tool(what, [sys.executable, "-m", "venv", "--without-pip", str(directory)])
            pins = directory / "constraints.txt"
            pins.write_text(_pins())
            python = _python(directory)
            pip_install(what, [f"{_PACKAGE}=={self.version}", "--constraint", str(pins)], python=python)
            run_tool("starting mini_swe_agent", [str(python), "-I", "-c", "import minisweagent.agents"])
            report(f"mini_swe_agent {self.version} is installed ({size_text(directory)})")

        install_once(self._target(cache), build, report)

    def check(self, spec: HarnessSpec) -> None:
        """mini-swe-agent has no options."""
        check_options(spec)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One run without questions. The instruction is in a configuration file, where it may have any length and form."""
        target = self._target(cache)
        builtin = target / "lib" / _PYTHON / "site-packages" / "minisweagent" / "config" / "mini.yaml"
        if "=" in str(builtin):
            raise UsageError(f"mini_swe_agent reads a path with `=` as a setting: set POLAR_CACHE to one without ({cache})")
        own = os.path.relpath(f"{home}/mini/task.yaml", workspace)  # relative, for the same reason
        argv = (
            # -I: the workspace must not shadow what the agent imports. -u: a log is worth most when the run was killed.
            *(str(_python(target)), "-I", "-u", "-m", "minisweagent"),
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
        return Launch(Command(argv, environment, readable=(str(target), *_base_python())), {"mini/task.yaml": _yaml(settings)})

    def _target(self, cache: Path) -> Path:
        digest = recipe_digest(self.version, _pins(), _PYTHON, sys.base_prefix)
        return cache.absolute() / "harnesses" / f"{self.name}-{self.version}-{digest}"


def _python(target: Path) -> Path:
    return target / "bin" / "python"


def _pins() -> str:
    return (resources.files("polar.harnesses") / "pins" / "mini_swe_agent.txt").read_text()


def _base_python() -> tuple[str, ...]:
    """The installation behind the virtual environment, where a sandbox does not show it anyway."""
    return () if Path(sys.base_prefix).is_relative_to("/usr") else (sys.base_prefix,)


def _yaml(data: object) -> str:
    """JSON that YAML reads as the same data: raw, it would refuse or fold some characters that JSON leaves as they are."""
    text = msgspec.json.encode(data).decode()
    return re.sub(r"[^\x20-\x7e]", lambda found: f"\\U{ord(found[0]):08x}", text)
