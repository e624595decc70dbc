"""Cline CLI (npm `cline`), a coding agent of one native program, with files, search, shell, sub-agents and teams as its tools.

Facts about 3.0.65 that the launch rests on, each seen in its source or in its requests:

- Telemetry and updates are off. The host of its feature flags, data.cline.bot, is still looked up, twice; where it is not
  found, nothing is said of it or waits for it.
- Standard input it reads from a pipe only, not from a file, and never when it prints events: so the instruction is an argument.
  Whitespace around it is lost. A single word would be taken for a command, and so would a first `/name`: a word of ours goes
  before these. No spelling keeps it from adding the text of a file that `@path` names, if the workspace has such a file.
- Sessions go through a daemon, unless the backend is `local`.
- It summarises at 90 % of `contextWindow`, by its own count of tokens, in a request of its own without tools. In requests it asks
  for as many tokens as that count leaves of the window; `maxTokens` is for summaries alone. After a request that was too long it
  cuts old tool results out of the history and goes on.
- The same call five times in a row ends the run, with status 0. A stream that breaks after some text ends it too, with status 1;
  other faults it survives.
- Sub-agents (`spawn_agent`) have the system prompt that the parent writes for them; the parent waits.
- The system prompt holds date and working directory. `.clinerules` and `AGENTS.md` of the workspace join it.
"""

import re
from pathlib import Path

from polar.harnesses.arguments import as_argument
from polar.harnesses.npm import NpmPackage, json_text, place_native
from polar.harnesses.options import check_options
from polar.harnesses.protocol import Endpoint, Launch, Report, Turn
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, KindRule, Task

_NATIVE = "@cline/cli-*/bin/cline"  # of the one optional package that fits this machine
_PROGRAM = "cline/bin/.cline"  # on every system
_PROVIDER = "openai-compatible"
_SUMMARY = 32_000  # tokens of a summary that are asked for at most


def place_program(directory: Path) -> None:
    """What the package's own `postinstall.mjs` does: the program gets one place on every system.

    Raises:
        InstallError: npm installed no program for this machine, or several.
    """
    place_native("cline", directory, _NATIVE, _PROGRAM)


_PACKAGE = NpmPackage("cline", "cline", "3.0.65", (_PROGRAM, "--version"), place_program)


def _run(command: str) -> tuple[str, dict[str, object]]:
    return "run_commands", {"commands": [command]}


class Cline:
    """Cline CLI at a pinned version, over the Chat Completions API."""

    name = "cline"
    version = _PACKAGE.version
    summary = "Cline CLI: files, search, shell, sub-agents, teams"
    profile = HarnessProfile(
        "cline",
        _PACKAGE.version,
        kinds=(
            KindRule("compaction", system=r"^Summarize the provided coding session into a concise continuation", tools="none"),
        ),
    )
    probe: tuple[Turn, ...] = (
        Turn("Let me write it.", (_run("printf 'hello\\n' > hello.txt"),)),
        Turn("", (_run("printf 'one\\n' > one.txt"), _run("printf 'two\\n' > two.txt"))),
        Turn("Done: three files are written."),
    )

    def installed(self, cache: Path) -> bool:
        """Whether Cline, and the Node.js that npm needs, are there."""
        return _PACKAGE.installed(cache)

    def install(self, cache: Path, report: Report) -> None:
        """Install Cline, and Node.js for npm if the system's is too old; see `Harness.install`."""
        _PACKAGE.install(cache, report)

    def check(self, spec: HarnessSpec) -> None:
        """Cline has no options."""
        check_options(spec)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One run that prints events; the instruction comes last, behind `--`, where nothing in it can be taken for an option."""
        argv = (
            *(str(_PACKAGE.program(cache)), "--json", "--auto-approve", "true"),
            *("--provider", _PROVIDER, "--model", endpoint.model, "--", _prompt(task)),
        )
        environment = {
            "CLINE_DIR": f"{home}/cline",
            "CLINE_NO_AUTO_UPDATE": "1",
            "CLINE_SESSION_BACKEND_MODE": "local",
        }
        settings = "cline/data/settings"
        files = {
            f"{settings}/providers.json": _providers(task, endpoint),
            f"{settings}/global-settings.json": json_text({"telemetryOptOut": True, "autoUpdateEnabled": False}),
        }
        return Launch(Command(argv, environment, readable=(str(_PACKAGE.target(cache)),)), files)


def _prompt(task: Task) -> str:
    text = as_argument(task)
    a_command = text.lstrip().startswith("/") or not re.search(r"\s", text.strip())
    return f"Task: {text}" if a_command else text


def _providers(task: Task, endpoint: Endpoint) -> str:
    window = endpoint.max_model_len
    settings = {
        "provider": _PROVIDER,
        "apiKey": endpoint.key,
        "model": endpoint.model,
        "baseUrl": f"{endpoint.base_url}/v1",
        "contextWindow": window,
        "maxTokens": min(task.sampling.max_tokens or _SUMMARY, window // 4),
    }
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    return json_text({"version": 1, "lastUsedProvider": _PROVIDER, "modes": {}, "providers": {_PROVIDER: entry}})
