"""Agent programs and how they are run. Each is looked up by its name, or imported as `module:Class`."""

import importlib

from polar.errors import UsageError
from polar.harnesses.aider import Aider
from polar.harnesses.claude_code import ClaudeCode
from polar.harnesses.cline import Cline
from polar.harnesses.codex import Codex
from polar.harnesses.continue_cli import ContinueCli
from polar.harnesses.copilot_cli import CopilotCli
from polar.harnesses.gemini_cli import GeminiCli
from polar.harnesses.gptme import Gptme
from polar.harnesses.hermes import Hermes
from polar.harnesses.mini_swe_agent import MiniSweAgent
from polar.harnesses.mistral_vibe import MistralVibe
from polar.harnesses.opencode import OpenCode
from polar.harnesses.openhands import OpenHands
from polar.harnesses.options import meant
from polar.harnesses.pi import Pi
from polar.harnesses.protocol import Endpoint, Harness, Launch, Report
from polar.harnesses.qwen_code import QwenCode
from polar.harnesses.shell import Shell

__all__ = ["Endpoint", "Harness", "Launch", "Report", "get", "names"]

_HARNESSES: tuple[Harness, ...] = (
    Pi(),
    QwenCode(),
    GeminiCli(),
    OpenCode(),
    MiniSweAgent(),
    Codex(),
    ClaudeCode(),
    OpenHands(),
    CopilotCli(),
    MistralVibe(),
    ContinueCli(),
    Cline(),
    Gptme(),
    Hermes(),
    Aider(),
    Shell(),
)
_PARTS = ("name", "version", "summary", "profile", "probe", "installed", "install", "check", "launch")


def names() -> tuple[str, ...]:
    """Names of the harnesses that come with Polar."""
    return tuple(harness.name for harness in _HARNESSES)


def get(name: str) -> Harness:
    """The harness of that name, or an instance of the class that `module:Class` names.

    Raises:
        UsageError: there is none; names those that exist.
    """
    for harness in _HARNESSES:
        if harness.name == name:
            return harness
    if ":" in name:
        return _imported(name)
    known = ", ".join(names())
    raise UsageError(f"there is no harness {name!r}{meant(name, names())}; there are {known}, and your own as `module:Class`")


def _imported(path: str) -> Harness:
    module, _, attribute = path.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except ModuleNotFoundError as error:
        raise UsageError(f"harness {path!r}: {error}. Is its directory on PYTHONPATH?") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"harness {path!r} must name a class that needs no arguments, as `module:Class`: {error}") from error
    if lacking := [part for part in _PARTS if not hasattr(made, part)]:
        raise UsageError(f"harness {path!r} lacks {', '.join(lacking)} (see polar.harnesses.protocol.Harness)")
    harness: Harness = made
    return harness
