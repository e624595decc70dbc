"""gptme (PyPI), an agent with a shell, Python, files and sub-agents.

Facts about 0.35.1:

- It runs the first tool call of a reply only, and forgets the others: a reply with several is rewritten in its history, and what
  comes after forks.
- Its history has a reply's text with other whitespace around it, its reasoning as `<think>` in the text, and the tool arguments
  in a spelling of its own.
- It ends when the policy calls `complete`; an answer without a tool call is asked again twice before.
- Beside the first calls it asks for a title of the conversation, without streaming.
- It shows the policy other agents at work in the same workspace, which it knows by the path of a script.
- A first `/` is a command to it, and a lone path a file. Paths and URLs in the instruction would be read; they are not.
- It counts tokens by characters, because the tokenizer would be downloaded: it looks no name up.
"""

from pathlib import Path

from polar.harnesses.arguments import as_argument, as_prose
from polar.harnesses.options import check_options
from polar.harnesses.protocol import Endpoint, Launch, Report, Turn
from polar.harnesses.venv import PythonPackage
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, KindRule, Task

_PACKAGE = PythonPackage("gptme", "gptme", "0.35.1", "import gptme.cli.main", "some 260 MB, half a minute or more")
_NAMING = r"\A(Generate concise conversation titles\.|Generate a descriptive name for this conversation\.)"
_CHECKPOINT = r"\A(Context budget has been reached|The messages above are an older part of a long conversation)"


def _run(command: str) -> tuple[str, dict[str, object]]:
    return "shell", {"command": command}


class Gptme:
    """gptme at a pinned version with pinned dependencies, in a virtual environment of its own."""

    name = "gptme"
    version = _PACKAGE.version
    summary = "gptme: shell, Python, files, sub-agents"
    profile = HarnessProfile(
        "gptme",
        _PACKAGE.version,
        normalisers=("think_in_text", "trim_text"),
        kinds=(KindRule("auxiliary", system=_NAMING, tools="none"), KindRule("compaction", last=_CHECKPOINT)),
    )
    probe: tuple[Turn, ...] = (
        Turn("Let me write it.", (_run("printf 'hello\\n' > hello.txt"),)),
        Turn("", (_run("printf 'one\\n' > one.txt"),)),
        Turn("", (_run("printf 'two\\n' > two.txt"),)),
        Turn("Done: three files are written.", (("complete", {}),)),
    )

    def installed(self, cache: Path) -> bool:
        """Whether its virtual environment is complete."""
        return _PACKAGE.installed(cache)

    def install(self, cache: Path, report: Report) -> None:
        """Make the virtual environment; see `Harness.install`."""
        _PACKAGE.install(cache, report)

    def check(self, spec: HarnessSpec) -> None:
        """gptme has no options."""
        check_options(spec)

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """One conversation without questions. The instruction is an argument behind `--`."""
        target = _PACKAGE.target(cache)
        argv = (
            # As a module: a process with a path of its script would be shown to the policy as another agent at work.
            *(str(_PACKAGE.interpreter(target)), "-I", "-u", "-m", "gptme"),
            *("--non-interactive", "--model", f"local/{endpoint.model}", "--tool-format", "tool"),
            *("--", as_prose(as_argument(task))),
        )
        environment = {
            "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
            "OPENAI_API_KEY": endpoint.key,
            "GPTME_CONTEXT_LENGTH": str(endpoint.max_model_len),
            "GPTME_TIKTOKEN_TIMEOUT": "0",  # count by characters: the tokenizer would be downloaded
            "GPTME_NO_LOCAL_DISCOVERY": "1",
            "GPTME_DISABLE_PATH_INCLUDE": "1",  # no path or URL of the instruction is read
        }
        return Launch(Command(argv, environment, readable=_PACKAGE.readable(target)))
