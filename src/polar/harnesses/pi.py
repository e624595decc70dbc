"""Pi (npm `@earendil-works/pi-coding-agent`), a small coding agent with the tools read, bash, edit and write.

Facts about 1.6.0 that the launch rests on, each seen in its source and in its requests:

- The system prompt holds the working directory and the path of Pi's own documentation, and neither date nor host name:
  sessions whose sandboxes show the same paths get the same prompt on the same machine. `AGENTS.md` and `CLAUDE.md` of the
  workspace join it, and those of the directories above: in a `process` sandbox these are directories of the host.
- It asks for at most `context window - estimated input - 4096` tokens, and never for less than one: in a small window
  every reply would soon end after one token. So it is told of 4,096 tokens more; the gateway, which counts exactly, keeps
  the bound.
- A reply that ends with `length` below the model's `maxTokens` counts as a context overflow: Pi forgets it, compacts and
  asks again. So `maxTokens` is the task's own limit.
- Exit status 0 says nothing: after errors of the model, too, Pi ends with 0 in JSON mode.
"""

from importlib import resources
from pathlib import Path

import msgspec

from polar.errors import InstallError
from polar.harnesses import node
from polar.harnesses.install import install_once, is_complete, recipe_digest, run_tool, size_text
from polar.harnesses.options import check_options
from polar.harnesses.protocol import Endpoint, Launch, Report
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, Task

_PACKAGE = "@earendil-works/pi-coding-agent"
_PROVIDER = "polar"
_CONTEXT_MARGIN = 4096  # tokens of the window that Pi leaves unused
_RESERVE, _KEEP = 16384, 20000  # Pi's own defaults: free tokens below which it compacts, and recent tokens it keeps then


class Pi:
    """Pi at a pinned version, over the Chat Completions API."""

    name = "pi"
    version = "1.6.0"
    summary = "Pi, a small coding agent: read, bash, edit, write"
    profile = HarnessProfile("pi", "1.6.0")

    def installed(self, cache: Path) -> bool:
        """Whether Pi and a Node.js for it are there."""
        return is_complete(self._target(cache)) and node.find(cache) is not None

    def install(self, cache: Path, report: Report) -> None:
        """Install Pi, and Node.js if the system's is too old; see `Harness.install`."""
        runtime = node.ensure(cache, report)
        target = self._target(cache)
        if is_complete(target):
            return

        def build(directory: Path) -> None:
            report(f"installing pi {self.version} from npm")
            (directory / "package-lock.json").write_text(_lock())
            (directory / "package.json").write_text(_manifest(self.version))
            node.npm_ci(f"installing pi {self.version}", runtime, directory)
            run_tool("starting pi", [str(runtime.node), str(_program(directory)), "--version"])
            report(f"pi {self.version} is installed ({size_text(directory)})")

        install_once(target, build, report)

    def check(self, spec: HarnessSpec) -> None:
        """Pi has no options."""
        check_options(spec)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One run in JSON mode; the instruction goes to standard input, where nothing in it can be taken for an option."""
        runtime = node.find(cache)
        if runtime is None:
            raise InstallError("Node.js, which pi runs on, is not installed; install the harness first")
        target = self._target(cache)
        argv = (
            *(str(runtime.node), str(_program(target))),
            *("--print", "--mode", "json", "--no-session", "--no-extensions"),
            *("--provider", _PROVIDER, "--model", endpoint.model),
        )
        environment = {
            "PI_CODING_AGENT_DIR": f"{home}/agent",
            "PI_OFFLINE": "1",
            "PI_TELEMETRY": "0",
            "PI_SKIP_VERSION_CHECK": "1",
        }
        command = Command(argv, environment, task.instruction, (str(target), *runtime.readable))
        return Launch(command, {"agent/models.json": _models(task, endpoint), "agent/settings.json": _settings(endpoint)})

    def _target(self, cache: Path) -> Path:
        digest = recipe_digest(_manifest(self.version), _lock())
        return cache.absolute() / "harnesses" / f"{self.name}-{self.version}-{digest}"


def _program(target: Path) -> Path:
    return target / "node_modules" / _PACKAGE / "dist" / "bundle" / "cli.js"


def _lock() -> str:
    return (resources.files("polar.harnesses") / "pins" / "pi.lock.json").read_text()


def _manifest(version: str) -> str:
    return _json({"name": "polar-pi", "private": True, "dependencies": {_PACKAGE: version}})


def _models(task: Task, endpoint: Endpoint) -> str:
    model = {
        "id": endpoint.model,
        "name": endpoint.model,
        "reasoning": False,  # whether the policy thinks is its template's business; True would only add `reasoning_effort`
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": endpoint.max_model_len + _CONTEXT_MARGIN,
        "maxTokens": task.sampling.max_tokens or endpoint.max_model_len,
    }
    provider = {
        "baseUrl": f"{endpoint.base_url}/v1",
        "api": "openai-completions",
        "apiKey": endpoint.key,
        "models": [model],
    }
    return _json({"providers": {_PROVIDER: provider}})


def _settings(endpoint: Endpoint) -> str:
    window = endpoint.max_model_len
    compaction = {
        "reserveTokens": min(_RESERVE, window // 4) + _CONTEXT_MARGIN,
        "keepRecentTokens": min(_KEEP, window // 4),
    }
    return _json({"compaction": compaction})


def _json(data: object) -> str:
    return msgspec.json.format(msgspec.json.encode(data)).decode() + "\n"
