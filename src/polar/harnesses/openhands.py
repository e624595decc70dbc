"""OpenHands CLI (PyPI `openhands`), an agent with a terminal, a file editor, a task list and sub-agents.

Facts about 1.16.0 (its SDK is 1.21.0):

- It runs on Python 3.12 only. It asks without streaming.
- Its history has no reasoning, and the tool arguments in a spelling of its own.
- Its system prompt ends with the date and the time of day: the first prompts of a group differ.
- Tool arguments must have a `security_risk`.
- It condenses its history by a call of its own after 80 events, and when the model says that the prompt is too long; what
  follows stands on the summary.
- It gives up below a context window of 16,384 tokens, unless told otherwise, as it is here.
- Its start takes some twenty seconds, most of it imports.
- Two look-ups of names remain at each start, and no setting stops them: `github.com`, from where it would clone skills, and
  `pypi.org`, for the newest version. Where they fail it goes on; where they do not, public skills join its prompt.
"""

from pathlib import Path

from polar.harnesses.arguments import as_argument
from polar.harnesses.npm import json_text
from polar.harnesses.options import check_options
from polar.harnesses.protocol import Endpoint, Launch, Report, shell_probe
from polar.harnesses.venv import PythonPackage
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, KindRule, Task

_PACKAGE = PythonPackage(
    "openhands",
    "openhands",
    "1.16.0",
    "import openhands_cli.entrypoint",
    "some 780 MB, a minute or more",
    python=(3, 12),
    newest=(3, 12),
)
_CONDENSING = r"\AYou are maintaining a context-aware state summary for an interactive agent\."
_TOOLS = ("terminal", "file_editor", "task_tracker", "task_tool_set")  # those of its command line


class OpenHands:
    """OpenHands at a pinned version with pinned dependencies, in a virtual environment of its own."""

    name = "openhands"
    version = _PACKAGE.version
    summary = "OpenHands CLI: terminal, file editor, task list, sub-agents"
    profile = HarnessProfile(
        "openhands",
        _PACKAGE.version,
        # After a context error it starts anew without its system prompt, and is the agent all the same.
        kinds=(KindRule("compaction", last=_CONDENSING, tools="none"), KindRule("agent", tools="some")),
    )
    probe = shell_probe("terminal", security_risk="LOW")

    def installed(self, cache: Path) -> bool:
        """Whether its virtual environment is complete."""
        return _PACKAGE.installed(cache)

    def install(self, cache: Path, report: Report) -> None:
        """Make the virtual environment; see `Harness.install`."""
        _PACKAGE.install(cache, report)

    def check(self, spec: HarnessSpec) -> None:
        """OpenHands has no options."""
        check_options(spec)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One run without a screen. The instruction is an argument, because a file's text is shown as a file's."""
        target = _PACKAGE.target(cache)
        argv = (
            *_PACKAGE.script(target, "openhands"),
            *("--headless", "--json", "--always-approve", "--exit-without-confirmation", f"--task={as_argument(task)}"),
        )
        environment = {
            "OPENHANDS_PERSISTENCE_DIR": f"{home}/.openhands",
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "ALLOW_SHORT_CONTEXT_WINDOWS": "true",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_MODE": "PRODUCTION",  # else it looks for `.env` files
            "GIT_TERMINAL_PROMPT": "0",  # a clone that wants a password fails instead of waiting
        }
        settings = {".openhands/agent_settings.json": _settings(endpoint)}
        return Launch(Command(argv, environment, readable=_PACKAGE.readable(target)), settings)


def _settings(endpoint: Endpoint) -> str:
    """The agent that its command line would make, for a model with a known context window."""
    llm = {
        "model": f"openai/{endpoint.model}",
        "api_key": endpoint.key,
        "base_url": f"{endpoint.base_url}/v1",
        "max_input_tokens": endpoint.max_model_len,
    }
    agent = {
        "kind": "Agent",
        "llm": llm | {"usage_id": "agent"},
        "tools": [{"name": name} for name in _TOOLS],
        "system_prompt_kwargs": {"cli_mode": True, "llm_security_analyzer": True},
        "condenser": {
            "kind": "LLMSummarizingCondenser",
            "llm": llm | {"usage_id": "condenser"},
            "max_size": 80,
            "keep_first": 4,
        },
    }
    return json_text(agent)
