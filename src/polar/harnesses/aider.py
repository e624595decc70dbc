"""aider (PyPI `aider-chat`), a pair programmer without tools: the policy writes whole files as text, and aider saves them.

Facts about 0.86.2:

- Its edit format is `whole`: the policy writes a file's name and then all of the file in a fence. What is edited need not be
  there, or be in the chat.
- The first prompt holds a made-up talk, assistant turns and all, as an example.
- It reads one message, answers, and ends; it asks again, up to three times, where an edit cannot be applied.
- In a workspace with a repository it shows the policy a map of it, and leaves `.aider.tags.cache.v4` there. In one without it
  would make a repository; it is told not to.
- The window is told in a file, which saves the table of models that it would fetch: it looks no name up.
- `--no-auto-commits` saves the call that would write a commit's message.
"""

from pathlib import Path

from polar.harnesses.arguments import as_prose
from polar.harnesses.npm import json_text
from polar.harnesses.options import check_options
from polar.harnesses.protocol import Endpoint, Launch, Report, Turn
from polar.harnesses.venv import PythonPackage
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, KindRule, Task

_PACKAGE = PythonPackage(
    "aider",
    "aider-chat",
    "0.86.2",
    "import aider.main",
    "some 690 MB, a minute or more",
    newest=(3, 12),
)
# Where there is no repository it would make one, with `--yes-always`; one above the workspace is none of its business.
_GIT_IF_THERE = 'test -e .git || set -- "$@" --no-git; exec "$@"'
_COMMIT = "generates concise, one-line Git commit messages"
_SUMMARY = r"\A\*Briefly\* summarize this partial conversation about programming\."


def _whole(**files: str) -> str:
    return "\n".join(f"{name}.txt\n```\n{text}\n```\n" for name, text in files.items())


class Aider:
    """aider at a pinned version with pinned dependencies, in a virtual environment of its own."""

    name = "aider"
    version = _PACKAGE.version
    summary = "aider: whole-file edits as text, no tools"
    profile = HarnessProfile(
        "aider", _PACKAGE.version, kinds=(KindRule("auxiliary", system=_COMMIT), KindRule("compaction", system=_SUMMARY))
    )
    probe: tuple[Turn, ...] = (Turn(f"Let me write them.\n\n{_whole(hello='hello', one='one', two='two')}"),)

    def installed(self, cache: Path) -> bool:
        """Whether its virtual environment is complete."""
        return _PACKAGE.installed(cache)

    def install(self, cache: Path, report: Report) -> None:
        """Make the virtual environment; see `Harness.install`."""
        _PACKAGE.install(cache, report)

    def check(self, spec: HarnessSpec) -> None:
        """aider has no options."""
        check_options(spec)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One message, from a file, where it may have any length."""
        target = _PACKAGE.target(cache)
        model = f"openai/{endpoint.model}"
        argv = (
            *("/bin/sh", "-c", _GIT_IF_THERE, "aider"),
            *_PACKAGE.script(target, "aider"),
            *("--model", model, "--model-metadata-file", f"{home}/aider/models.json"),
            *("--edit-format", "whole", "--message-file", f"{home}/aider/task.txt"),
            *("--yes-always", "--no-auto-commits", "--no-dirty-commits", "--no-gitignore", "--no-detect-urls"),
            *("--no-pretty", "--no-fancy-input", "--no-check-update", "--no-show-release-notes", "--no-show-model-warnings"),
            *("--no-analytics", "--disable-playwright"),
            *("--input-history-file", f"{home}/aider/input.history", "--chat-history-file", f"{home}/aider/chat.history.md"),
        )
        environment = {
            "OPENAI_API_BASE": f"{endpoint.base_url}/v1",
            "OPENAI_API_KEY": endpoint.key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        files = {"aider/models.json": _models(model, endpoint), "aider/task.txt": as_prose(task.instruction)}
        return Launch(Command(argv, environment, readable=_PACKAGE.readable(target)), files)


def _models(model: str, endpoint: Endpoint) -> str:
    """What aider would else ask a table on the web for."""
    return json_text(
        {
            model: {
                "max_input_tokens": endpoint.max_model_len,
                "input_cost_per_token": 0,
                "output_cost_per_token": 0,
                "litellm_provider": "openai",
                "mode": "chat",
            }
        }
    )
