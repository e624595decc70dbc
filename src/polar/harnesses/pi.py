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
- It speaks four APIs, by its configuration (option `api`), and is the same agent in each. When it compacts it asks without tools,
  under a system prompt of its own.
"""

from pathlib import Path

from polar.harnesses.npm import NpmPackage, json_text
from polar.harnesses.options import check_options, chosen
from polar.harnesses.protocol import Endpoint, Launch, Report, shell_probe
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, KindRule, Task

_PACKAGE = NpmPackage(
    "pi", "@earendil-works/pi-coding-agent", "1.6.0", ("@earendil-works/pi-coding-agent/dist/bundle/cli.js", "--version")
)
_PROVIDER = "polar"
_APIS = {  # option → Pi's name for the API, and what its base URL has after the session's
    "chat": ("openai-completions", "/v1"),
    "responses": ("openai-responses", "/v1"),
    "anthropic": ("anthropic-messages", ""),
    "google": ("google-generative-ai", "/v1beta"),
}
API = tuple(_APIS)
_CHOICES = {"api": API}
_CONTEXT_MARGIN = 4096  # tokens of the window that Pi leaves unused
_RESERVE, _KEEP = 16384, 20000  # Pi's own defaults: free tokens below which it compacts, and recent tokens it keeps then


class Pi:
    """Pi at a pinned version, over the API that the option `api` names."""

    name = "pi"
    version = _PACKAGE.version
    summary = "Pi, a small coding agent: read, bash, edit, write"
    profile = HarnessProfile(
        "pi",
        _PACKAGE.version,
        kinds=(KindRule("compaction", system=r"^You are a context summarization assistant", tools="none"),),
    )
    probe = shell_probe("bash")

    def installed(self, cache: Path) -> bool:
        """Whether Pi and a Node.js for it are there."""
        return _PACKAGE.installed(cache)

    def install(self, cache: Path, report: Report) -> None:
        """Install Pi, and Node.js if the system's is too old; see `Harness.install`."""
        _PACKAGE.install(cache, report)

    def check(self, spec: HarnessSpec) -> None:
        """`api` is `chat` (the default), `responses`, `anthropic` or `google`."""
        check_options(spec, choices=_CHOICES)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One run in JSON mode; the instruction goes to standard input, where nothing in it can be taken for an option."""
        runtime = _PACKAGE.runtime(cache)
        argv = (
            *(str(runtime.node), str(_PACKAGE.program(cache))),
            *("--print", "--mode", "json", "--no-session", "--no-extensions"),
            *("--provider", _PROVIDER, "--model", _model(task, endpoint)),
        )
        environment = {
            "PI_CODING_AGENT_DIR": f"{home}/agent",
            "PI_OFFLINE": "1",
            "PI_TELEMETRY": "0",
            "PI_SKIP_VERSION_CHECK": "1",
        }
        command = Command(argv, environment, task.instruction, (str(_PACKAGE.target(cache)), *runtime.readable))
        return Launch(command, {"agent/models.json": _models(task, endpoint), "agent/settings.json": _settings(endpoint)})


def _model(task: Task, endpoint: Endpoint) -> str:
    """The model's name. Google's API has it in the path, where a `/` would be another route."""
    return endpoint.model.rpartition("/")[2] if chosen(task.harness, "api", _CHOICES) == "google" else endpoint.model


def _models(task: Task, endpoint: Endpoint) -> str:
    api, path = _APIS[chosen(task.harness, "api", _CHOICES)]
    model = {
        "id": _model(task, endpoint),
        "name": endpoint.model,
        "reasoning": False,  # whether the policy thinks is its template's business; True would only add `reasoning_effort`
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": endpoint.max_model_len + _CONTEXT_MARGIN,
        "maxTokens": task.sampling.max_tokens or endpoint.max_model_len,
    }
    provider = {
        "baseUrl": f"{endpoint.base_url}{path}",
        "api": api,
        "apiKey": endpoint.key,
        "models": [model],
    }
    return json_text({"providers": {_PROVIDER: provider}})


def _settings(endpoint: Endpoint) -> str:
    window = endpoint.max_model_len
    compaction = {
        "reserveTokens": min(_RESERVE, window // 4) + _CONTEXT_MARGIN,
        "keepRecentTokens": min(_KEEP, window // 4),
    }
    return json_text({"compaction": compaction})
