"""Continue CLI (npm `@continuedev/cli`), a coding agent with files, search and a shell as its tools.

Facts about 1.5.47 that the launch rests on, each seen in its source or in its requests:

- Telemetry is off. One request stays, for the newest version at api.continue.dev: it is written into the program, and where
  that name is not found, nothing is said of it or waits for it.
- It reads its instruction from standard input, without the whitespace around it. `/compact` alone would be a command.
- Reasoning is dropped from its history, and arguments of tools are written anew. After a stream that broke it asks again, but
  what had arrived stays in front of the new answer, so the next turn forks.
- It compacts by its own count of tokens, of another tokenizer: `maxTokens`, and as much again but 15,000 at most, before the end
  of the window, with the conversation's tools and system prompt. All that is left then is the summary, as the policy's turn;
  and the first answer after it is followed by a `continue`.
- Replies of `maxTokens` must leave room for a prompt, or it refuses to start.
- A name of OpenAI's (`gpt-5…`, `o3…`) would be asked over the Responses API; a policy should not be named like that.
- Commands run in a login shell, which sets `PATH` anew (`/etc/profile`), and `.env` of the workspace joins its environment.
- The system prompt holds working directory, date and git status; the first of `AGENTS.md`, `AGENT.md`, `CLAUDE.md` and `CODEX.md`
  in the workspace joins it.
"""

from pathlib import Path

from polar.harnesses.npm import NpmPackage, json_text
from polar.harnesses.options import check_options
from polar.harnesses.protocol import Endpoint, Launch, Report, shell_probe
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, KindRule, Task

_PACKAGE = NpmPackage("continue_cli", "@continuedev/cli", "1.5.47", ("@continuedev/cli/dist/cn.js", "--version"))
_OUTPUT = 32_000  # tokens of a reply that are asked for at most
_COMMAND = "/compact"
_CONFIG = "continue/config.yaml"


class ContinueCli:
    """Continue CLI at a pinned version, over the Chat Completions API."""

    name = "continue_cli"
    version = _PACKAGE.version
    summary = "Continue CLI: files, search, shell"
    profile = HarnessProfile(
        "continue_cli",
        _PACKAGE.version,
        kinds=(KindRule("compaction", last=r"^Please provide a concise summary of our conversation so far, capturing the key"),),
    )
    probe = shell_probe("Bash")

    def installed(self, cache: Path) -> bool:
        """Whether Continue CLI and a Node.js for it are there."""
        return _PACKAGE.installed(cache)

    def install(self, cache: Path, report: Report) -> None:
        """Install Continue CLI, and Node.js if the system's is too old; see `Harness.install`."""
        _PACKAGE.install(cache, report)

    def check(self, spec: HarnessSpec) -> None:
        """Continue CLI has no options."""
        check_options(spec)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One run that prints its answer; the instruction goes to standard input, where nothing in it is an option."""
        runtime = _PACKAGE.runtime(cache)
        argv = (str(runtime.node), str(_PACKAGE.program(cache)), "--print", "--auto", "--config", f"{home}/{_CONFIG}")
        environment = {
            "CONTINUE_GLOBAL_DIR": f"{home}/continue",
            "CONTINUE_METRICS_ENABLED": "0",
            "CONTINUE_CLI_ENABLE_TELEMETRY": "0",
        }
        alone = task.instruction.strip() == _COMMAND
        instruction = f"Task: {task.instruction}" if alone else task.instruction
        command = Command(argv, environment, instruction, (str(_PACKAGE.target(cache)), *runtime.readable))
        return Launch(command, {_CONFIG: _config(task, endpoint)})


def _config(task: Task, endpoint: Endpoint) -> str:
    """The configuration in YAML, which JSON is."""
    window = endpoint.max_model_len
    model = {
        "name": endpoint.model,
        "provider": "openai",
        "model": endpoint.model,
        "apiBase": f"{endpoint.base_url}/v1",
        "apiKey": endpoint.key,
        "roles": ["chat"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {
            "contextLength": window,
            "maxTokens": min(task.sampling.max_tokens or _OUTPUT, window // 4),
        },
    }
    return json_text({"name": "polar", "version": "1.0.0", "schema": "v1", "models": [model]})
