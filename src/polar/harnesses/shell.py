"""Any program as a harness: a shell line that finds its model in the environment."""

from pathlib import Path

from polar.errors import UsageError
from polar.harnesses.options import check_options
from polar.harnesses.protocol import Endpoint, Launch, Report, Turn
from polar.sandboxes.protocol import shell
from polar.specs import HarnessProfile, HarnessSpec, Task

_LONGEST = 128 * 1024 - 64  # bytes that the kernel takes for one environment variable, with its name


class Shell:
    """Runs the option `command`.

    Its environment has the endpoint under the names that OpenAI's and Anthropic's SDKs read, and `POLAR_BASE_URL`,
    `POLAR_API_KEY`, `POLAR_MODEL` and `POLAR_INSTRUCTION`.
    """

    name = "shell"
    version = ""
    summary = "any program: the shell line in the option `command`"
    profile = HarnessProfile("shell")
    probe: tuple[Turn, ...] = ()

    def installed(self, cache: Path) -> bool:
        """Nothing is to be installed."""
        return True

    def install(self, cache: Path, report: Report) -> None:
        """Nothing is to be installed."""

    def check(self, spec: HarnessSpec) -> None:
        """`command` must be given, and nothing else."""
        check_options(spec, required=["command"])

    def launch(self, task: Task, endpoint: Endpoint, *, cache: Path, workspace: str, home: str) -> Launch:
        """The option's shell line, in the workspace.

        Raises:
            UsageError: the instruction is too long for an environment variable.
        """
        self.check(task.harness)
        if len(task.instruction.encode()) > _LONGEST:
            raise UsageError(
                f"the instruction of task {task.id!r} is longer than the {_LONGEST} bytes that `shell` can hand over"
            )
        environment = {
            "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
            "OPENAI_API_KEY": endpoint.key,
            "ANTHROPIC_BASE_URL": endpoint.base_url,
            "ANTHROPIC_API_KEY": endpoint.key,
            "POLAR_BASE_URL": endpoint.base_url,
            "POLAR_API_KEY": endpoint.key,
            "POLAR_MODEL": endpoint.model,
            "POLAR_INSTRUCTION": task.instruction,
        }
        return Launch(shell(task.harness.options["command"], environment))
