"""How an agent program is installed, configured and launched. Nobody changes the program: it is only pointed at the gateway."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, Task

Report = Callable[[str], None]


class Endpoint(Struct, frozen=True):
    """Where a harness finds its model.

    Attributes:
        base_url: `http://host:port/s/{key}`; each dialect's own paths (`/v1/chat/completions`) start below it.
        key: the session's model key, for harnesses that insist on an API key.
        model: model name to ask for.
        max_model_len: tokens of prompt and reply together, for harnesses that plan with it.
    """

    base_url: str
    key: str
    model: str
    max_model_len: int


class Launch(Struct, frozen=True):
    """What to write into the sandbox's home and what to run then."""

    command: Command
    home_files: dict[str, str] = {}


class Turn(Struct, frozen=True):
    """One scripted reply: what the policy says, and the tools that it calls, as (name, arguments)."""

    text: str = ""
    calls: tuple[tuple[str, dict[str, object]], ...] = ()


class Harness(Protocol):
    """An agent program at a pinned version.

    Attributes:
        probe: a scripted session for `polar harness check`: one call that writes `hello.txt` (holding `hello` and a newline),
            then two calls at once that write `one.txt` and `two.txt`, then an answer, as this harness's own tools take them.
            A harness without tools or without parallel calls comes as close as it can.
    """

    name: str
    version: str
    summary: str
    profile: HarnessProfile
    probe: tuple[Turn, ...]

    def installed(self, cache: Path) -> bool:
        """Whether `install` has nothing to do."""
        ...

    def install(self, cache: Path, report: Report) -> None:
        """Install into `cache`, once per version, atomically; `report` gets a line per step.

        Raises:
            InstallError: with the tool's last lines and what to do (no network, package not served, disk full).
        """
        ...

    def check(self, spec: HarnessSpec) -> None:
        """Refuse options that this harness does not have.

        Raises:
            UsageError: naming the option and those that exist.
        """
        ...

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """How to run `task`; `workspace` and `home` are paths as seen inside the sandbox."""
        ...


def shell_probe(tool: str, argument: str = "command", **others: object) -> tuple[Turn, ...]:
    """The probe of a harness whose `tool` runs the shell line in `argument`; `others` are arguments that it insists on."""

    def run(command: str) -> tuple[str, dict[str, object]]:
        return tool, {argument: command, **others}

    return (
        Turn("Let me write it.", (run("printf 'hello\\n' > hello.txt"),)),
        Turn("", (run("printf 'one\\n' > one.txt"), run("printf 'two\\n' > two.txt"))),
        Turn("Done: three files are written."),
    )
