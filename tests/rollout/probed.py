"""Harnesses for the tests of `polar harness check`, as `tests.rollout.probed:Class`: one that works, and how others fail."""

import sys
from pathlib import Path

from polar.errors import InstallError
from polar.harnesses.protocol import Endpoint, Launch, Report, Turn, shell_probe
from polar.harnesses.shell import Shell
from polar.sandboxes.protocol import Command
from polar.specs import HarnessProfile, HarnessSpec, Task

AGENT = Path(__file__).with_name("agent.py")


class Good(Shell):
    """The small agent of these tests, unchanged."""

    name = "good"
    version = "1.0"
    mode = ""
    profile = HarnessProfile("good", "1.0")
    probe = shell_probe("bash")

    def check(self, spec: HarnessSpec) -> None:
        """It has no options."""

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        environment = {
            "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
            "OPENAI_API_KEY": endpoint.key,
            "POLAR_BASE_URL": endpoint.base_url,
            "POLAR_MODEL": endpoint.model,
            "POLAR_INSTRUCTION": task.instruction,
            "AGENT_MODE": self.mode,
        }
        return Launch(
            Command((sys.executable, str(AGENT)), environment, readable=(str(AGENT.parent), sys.base_prefix, sys.prefix))
        )


class Lazy(Good):
    """Answers at once, and writes nothing."""

    probe = (Turn("Done."),)


class Sloppy(Good):
    """Writes something else than was asked."""

    probe = (Turn("", (("bash", {"command": "echo hullo > hello.txt; echo one > one.txt; echo two > two.txt"}),)), Turn("Done."))


class Short(Good):
    """Ends after its first tool call."""

    mode = "once"


class Silent(Good):
    """Never calls the model."""

    mode = "silent"


class Crashing(Good):
    """Dies of a signal after its work."""

    mode = "crash"


class Curious(Good):
    """Asks for a route that nobody serves."""

    mode = "curious"


class Unpacked(Good):
    """Cannot be installed."""

    def installed(self, cache: Path) -> bool:
        return False

    def install(self, cache: Path, report: Report) -> None:
        report("fetching it")
        raise InstallError("no network: check the connection and try again")


class Broken(Good):
    """Its class has a bug."""

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        raise KeyError("home")
