"""GitHub Copilot CLI (npm `@github/copilot`), a coding agent of one native program, with files, shell and sub-agents.

Facts about 1.0.102 that the launch rests on, each seen in its requests or in its own help:

- Pointed at a provider of one's own and told to be offline, it needs no account and looks up no name at all.
- It speaks three APIs, by the option `api`, and is the same agent in each. The first prompt has some 12,300 tokens: a third of
  a window of 32,768 tokens, so smaller ones are of little use.
- Compactions and sub-agents name themselves in `x-interaction-type`. A compaction comes without tools, at first beside the agent,
  which goes on meanwhile; only when little is left of `COPILOT_PROVIDER_MAX_PROMPT_TOKENS` does the agent wait for it.
- On standard input the instruction is text, but for whitespace at its end: no commands, no mentions. The time goes before it.
- The system prompt holds working directory, system, model and the session's folder, which is named by the session's id: with a
  fixed id, sessions whose sandboxes show the same paths get the same system prompt. `AGENTS.md` and
  `.github/copilot-instructions.md` of the workspace join it.
- The program unpacks 235 MB into a cache before it starts: here when it is installed, not in every session.
"""

from pathlib import Path

from polar.harnesses.install import run_tool
from polar.harnesses.npm import NpmPackage, place_native
from polar.harnesses.options import check_options, chosen
from polar.harnesses.protocol import Endpoint, Launch, Report, shell_probe
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, KindRule, Task

_APIS = {  # option → type of provider, its wire API, and what its base URL has after the session's
    "completions": ("openai", "completions", "/v1"),
    "responses": ("openai", "responses", "/v1"),
    "anthropic": ("anthropic", "completions", ""),
}
_CHOICES = {"api": tuple(_APIS)}
_SESSION = "00000000-0000-4000-8000-000000000000"  # any id: each session has a home of its own
_OUTPUT = 32_000  # tokens of a reply that are asked for at most
_INTERACTION = "x-interaction-type"
_NATIVE = "@github/copilot-*/copilot"  # of the one optional package that fits this machine
_PROGRAM = "@github/copilot/copilot"  # on every system
_UNPACKED = "unpacked"


def finish(directory: Path) -> None:
    """Put the program of this machine beside its package, and have it unpack itself, once for all sessions.

    Raises:
        InstallError: npm installed no program for this machine, or several.
    """
    program = place_native("copilot_cli", directory, _NATIVE, _PROGRAM)
    cache = str(directory / _UNPACKED)
    alone = {"COPILOT_SEA_EXTRACT_ONLY": "1", "COPILOT_PKG_CACHE_HOME": cache, "HOME": cache}
    run_tool("unpacking copilot_cli", [str(program)], env=alone)


_PACKAGE = NpmPackage("copilot_cli", "@github/copilot", "1.0.102", (_PROGRAM, "--version"), finish)


class CopilotCli:
    """Copilot CLI at a pinned version, over the API that the option `api` names."""

    name = "copilot_cli"
    version = _PACKAGE.version
    summary = "GitHub Copilot CLI: files, shell, sub-agents"
    profile = HarnessProfile(
        "copilot_cli",
        _PACKAGE.version,
        kinds=(
            KindRule("compaction", header=_INTERACTION, header_value=r"^conversation-compaction$"),
            KindRule("subagent", header=_INTERACTION, header_value=r"^conversation-subagent$"),
        ),
    )
    probe = shell_probe("bash", description="Writes a file")

    def installed(self, cache: Path) -> bool:
        """Whether Copilot CLI, and the Node.js that npm needs, are there."""
        return _PACKAGE.installed(cache)

    def install(self, cache: Path, report: Report) -> None:
        """Install Copilot CLI, and Node.js for npm if the system's is too old; see `Harness.install`."""
        _PACKAGE.install(cache, report)

    def check(self, spec: HarnessSpec) -> None:
        """`api` is `completions` (the default), `responses` or `anthropic`."""
        check_options(spec, choices=_CHOICES)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One run that prints events; the instruction goes to standard input, where nothing in it can be taken for an option."""
        argv = (
            *(str(_PACKAGE.program(cache)), "--output-format", "json", "--no-color"),
            *("--allow-all-tools", "--allow-all-paths", "--session-id", _SESSION),
        )
        environment = _environment(task, endpoint, home) | {
            "COPILOT_PKG_CACHE_HOME": str(_PACKAGE.target(cache) / _UNPACKED),
        }
        return Launch(Command(argv, environment, task.instruction, (str(_PACKAGE.target(cache)),)))


def _environment(task: Task, endpoint: Endpoint, home: str) -> dict[str, str]:
    provider, wire, path = _APIS[chosen(task.harness, "api", _CHOICES)]
    window = endpoint.max_model_len
    output = min(task.sampling.max_tokens or _OUTPUT, window // 4)
    return {
        "COPILOT_OFFLINE": "true",
        "COPILOT_AUTO_UPDATE": "false",
        "COPILOT_HOME": f"{home}/copilot",
        "COPILOT_CACHE_HOME": f"{home}/copilot/cache",
        "COPILOT_MODEL": endpoint.model,
        "COPILOT_PROVIDER_TYPE": provider,
        "COPILOT_PROVIDER_WIRE_API": wire,
        "COPILOT_PROVIDER_BASE_URL": f"{endpoint.base_url}{path}",
        "COPILOT_PROVIDER_API_KEY": endpoint.key,
        "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(window - output),
        "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(output),
    }
