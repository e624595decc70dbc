"""Codex CLI (npm `@openai/codex`), a coding agent of one native program, with a shell as its main tool.

Facts about 0.171.0 that the launch rests on, each seen in its requests:

- A model name that its catalogue lacks makes it plain: ordinary function tools, HTTP without WebSocket. A name of OpenAI's
  would bring other tools (`exec`, which takes JavaScript) and another prompt, so policies should not be named like one.
- By default it also offers sub-agents in a `namespace` of tools, goals, image viewing and a hosted web search, and looks for
  plugins at github.com and chatgpt.com. `tools: minimal` is a fifth of that: `exec_command`, `write_stdin`, and
  `request_user_input`, which cannot be taken away and is for a mode that is never on. `all` adds sub-agents, goals and images.
- It ends when the main turn ends, and kills sub-agents that still work; a policy has to `wait_agent`.
- It gives up at once on 400 and 429. After 5xx and a broken stream it asks again, `stream_max_retries` times, each of them
  `request_max_retries` times more on 5xx; where nobody listens it waits for ever.
- It plans with the tokens that a reply reports: above `model_auto_compact_token_limit` it has the policy summarise.
  A summary that does not fit is asked for again without the oldest messages; any other prompt that does not fit ends the
  session, and so does a reply that was cut for its length.
- A login shell would set `PATH` anew (`/etc/profile`), so commands get the sandbox's environment without one.
- The first prompt holds date, time zone and working directory; `AGENTS.md` of the workspace joins it.
"""

import re
from pathlib import Path

import msgspec

from polar.harnesses.npm import NpmPackage
from polar.harnesses.options import check_options, chosen
from polar.harnesses.protocol import Endpoint, Launch, Report, shell_probe
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, KindRule, Task

_PACKAGE = NpmPackage("codex", "@openai/codex", "0.171.0", ("@openai/codex/bin/codex.js", "--version"))
_CHOICES = {"tools": ("minimal", "all")}
_KEY = "POLAR_MODEL_KEY"
_REQUEST_RETRIES, _STREAM_RETRIES = 4, 9  # pauses double from 0.2 s, so the latter are good for a minute and more
_IDLE = 1_800_000  # milliseconds without an event; the gateway's keep-alives are events
_RESERVE = 16_384  # tokens that are kept free for a reply and a tool's output, in a window that is large enough
_TOOL_OUTPUT = 10_000  # Codex's own limit, in tokens


class Codex:
    """Codex at a pinned version, over the Responses API."""

    name = "codex"
    version = _PACKAGE.version
    summary = "Codex CLI: a shell, and with `tools: all` sub-agents"
    profile = HarnessProfile(
        "codex",
        _PACKAGE.version,
        kinds=(
            KindRule("compaction", header="x-codex-turn-metadata", header_value=r'"request_kind":\s*"compaction"'),
            KindRule("subagent", header="x-openai-subagent"),
            KindRule("subagent", header="x-codex-parent-thread-id"),
        ),
    )
    probe = shell_probe("exec_command", "cmd")

    def installed(self, cache: Path) -> bool:
        """Whether Codex and a Node.js for its starter are there."""
        return _PACKAGE.installed(cache)

    def install(self, cache: Path, report: Report) -> None:
        """Install Codex, and Node.js if the system's is too old; see `Harness.install`."""
        _PACKAGE.install(cache, report)

    def check(self, spec: HarnessSpec) -> None:
        """`tools` is `minimal` (the default) or `all`."""
        check_options(spec, choices=_CHOICES)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One run that prints events; the instruction goes to standard input, where nothing in it can be taken for an option."""
        runtime = _PACKAGE.runtime(cache)
        argv = (str(runtime.node), str(_PACKAGE.program(cache)), "exec", "--json", "--skip-git-repo-check", "-")
        environment = {"CODEX_HOME": f"{home}/codex", _KEY: endpoint.key}
        command = Command(argv, environment, task.instruction, (str(_PACKAGE.target(cache)), *runtime.readable))
        return Launch(command, {"codex/config.toml": _config(task, endpoint)})


def _config(task: Task, endpoint: Endpoint) -> str:
    window = endpoint.max_model_len
    reserve = min(_RESERVE, window // 4)
    everything = chosen(task.harness, "tools", _CHOICES) == "all"
    return _toml(
        {
            "": {
                "model": endpoint.model,
                "model_provider": "polar",
                "model_context_window": window,
                "model_auto_compact_token_limit": window - reserve,
                "tool_output_token_limit": min(_TOOL_OUTPUT, reserve // 2),
                "approval_policy": "never",
                "sandbox_mode": "danger-full-access",  # it runs in a sandbox of ours
                "allow_login_shell": False,
                "check_for_update_on_startup": False,
                "web_search": "disabled",  # a hosted tool: OpenAI would run it
            },
            "model_providers.polar": {
                "name": "Polar",
                "base_url": f"{endpoint.base_url}/v1",
                "env_key": _KEY,
                "wire_api": "responses",
                "request_max_retries": _REQUEST_RETRIES,
                "stream_max_retries": _STREAM_RETRIES,
                "stream_idle_timeout_ms": _IDLE,
            },
            "analytics": {"enabled": False},
            "features": {
                **dict.fromkeys(("plugins", "remote_plugin", "apps"), False),  # they look for OpenAI's servers
                **dict.fromkeys(("goals", "view_image"), everything),
            },
            "agents": {"enabled": everything},
            "skills": {"include_instructions": False},  # instructions for OpenAI's own services
        }
    )


def _toml(tables: dict[str, dict[str, str | int | bool]]) -> str:
    lines: list[str] = []
    for table, values in tables.items():
        lines += [f"\n[{table}]"] if table else []
        lines += [f"{name} = {_toml_value(value)}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _toml_value(value: str | int | bool) -> str:
    """JSON, which is TOML for these types but for DEL, which TOML wants escaped."""
    return re.sub("\x7f", r"\\u007f", msgspec.json.encode(value).decode())
