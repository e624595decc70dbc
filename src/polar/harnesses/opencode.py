"""OpenCode (npm `opencode-ai`), a coding agent of one native program, with files, shell and sub-agents as its tools.

Facts about 1.18.33 that the launch rests on, each seen in its source or in its requests:

- Every request names its own session in `x-session-id`, and a sub-agent's also its parent in `x-parent-session-id`.
- Without `--title` its first request asks for one. Standard input is the message, word for word: no commands, no mentions.
- On its way it installs a package for plugins into its configuration directory, unless that looks as if it had one.
- It plans with `limit`: above `context - output` tokens it compacts. A limit for output that is as large as the context would
  leave nothing.
- After a request that was too long it compacts and goes on, and ends with status 1 although all went well.
- The text of a stream that broke stays in its history, before the answer to its second attempt.
- Of its configurations, `OPENCODE_CONFIG_CONTENT` comes last, after the workspace's.
- The first prompt holds the date and the working directory.
"""

import os
from pathlib import Path

from polar.errors import InstallError
from polar.harnesses.npm import NpmPackage, json_text
from polar.harnesses.options import check_options
from polar.harnesses.protocol import Endpoint, Launch, Report, shell_probe
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, KindRule, Task

_VERSION = "1.18.33"
_PROGRAM = "opencode-ai/bin/opencode.exe"
_OUTPUT = 32_000  # tokens that OpenCode asks for at most
_REQUEST_TIMEOUT = 1_800_000  # milliseconds; the gateway answers slow requests with headers and keep-alives
CPUINFO = Path("/proc/cpuinfo")
_PLUGIN = {"dependencies": {"@opencode-ai/plugin": _VERSION}}


def finish(target: Path) -> None:
    """Put the native program of this machine where its package wants it, as its install script would, and drop the others.

    Raises:
        InstallError: npm serves none for this machine.
    """
    modules = target / "node_modules"
    natives = sorted(modules.glob("opencode-*/bin/opencode"), key=lambda path: (_baseline(path) != _old_processor(), path))
    if not natives:
        raise InstallError("installing opencode failed: npm serves no opencode for this operating system and processor")
    os.replace(natives[0], modules / _PROGRAM)
    for other in natives[1:]:
        other.unlink()


def _baseline(program: Path) -> bool:
    return "-baseline" in program.parent.parent.name


def _old_processor() -> bool:
    """Whether this is a processor without AVX2, for which there are programs of their own."""
    try:
        flags = CPUINFO.read_text()
    except OSError:
        return False
    return "flags" in flags and "avx2" not in flags


_PACKAGE = NpmPackage("opencode", "opencode-ai", _VERSION, (_PROGRAM, "--version"), finish)


class OpenCode:
    """OpenCode at a pinned version, over the Chat Completions API."""

    name = "opencode"
    version = _PACKAGE.version
    summary = "OpenCode: files, shell, sub-agents"
    profile = HarnessProfile(
        "opencode",
        _PACKAGE.version,
        kinds=(
            KindRule("subagent", header="x-parent-session-id"),
            KindRule("compaction", system=r"^You are a context summarization agent", tools="none"),
            KindRule("auxiliary", system=r"^You are a title generator", tools="none"),
        ),
    )
    probe = shell_probe("bash", description="Writes a file")

    def installed(self, cache: Path) -> bool:
        """Whether OpenCode is there."""
        return _PACKAGE.installed(cache)

    def install(self, cache: Path, report: Report) -> None:
        """Install OpenCode; see `Harness.install`."""
        _PACKAGE.install(cache, report)

    def check(self, spec: HarnessSpec) -> None:
        """OpenCode has no options."""
        check_options(spec)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One run that prints events; the instruction goes to standard input, where nothing in it can be taken for an option."""
        argv = (
            *(str(_PACKAGE.program(cache)), "run", "--format", "json"),
            *("--title", "task", "--model", f"polar/{endpoint.model}"),
        )
        switches = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS", "SHARE")
        environment = {
            **{f"OPENCODE_DISABLE_{switch}": "1" for switch in switches},
            "OPENCODE_CONFIG_CONTENT": _config(task, endpoint),
            "XDG_CONFIG_HOME": f"{home}/config",
            "XDG_DATA_HOME": f"{home}/data",
            "XDG_STATE_HOME": f"{home}/state",
            "XDG_CACHE_HOME": f"{home}/cache",
        }
        command = Command(argv, environment, task.instruction, (str(_PACKAGE.target(cache)),))
        files = {
            "config/opencode/package.json": json_text(_PLUGIN),
            "config/opencode/package-lock.json": json_text({"lockfileVersion": 3, "packages": {"": _PLUGIN}}),
            "config/opencode/node_modules/.keep": "",
        }
        return Launch(command, files)


def _config(task: Task, endpoint: Endpoint) -> str:
    window = endpoint.max_model_len
    model = {
        "name": endpoint.model,
        "tool_call": True,
        "reasoning": True,
        "limit": {"context": window, "output": min(task.sampling.max_tokens or _OUTPUT, window // 4)},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Polar",
        "options": {"baseURL": f"{endpoint.base_url}/v1", "apiKey": endpoint.key, "timeout": _REQUEST_TIMEOUT},
        "models": {endpoint.model: model},
    }
    return json_text(
        {
            "autoupdate": False,
            "share": "disabled",
            "permission": "allow",
            "provider": {"polar": provider},
        }
    )
