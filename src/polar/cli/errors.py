"""How errors leave the command line: one line on stderr and an exit status, never a traceback for what we expected."""

import os
from typing import Any

import typer
from typer.core import TyperGroup

from polar.errors import PolarError, UsageError

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130


class PolarGroup(TyperGroup):
    """All commands. With POLAR_DEBUG set, errors keep their tracebacks."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PolarError as error:
            if os.environ.get("POLAR_DEBUG"):
                raise
            from polar.cli.console import complain

            complain(f"error: {error}")
            raise typer.Exit(WRONG_USAGE if isinstance(error, UsageError) else FAILED) from None
        except OSError as error:
            # A file or directory that the user named, or that Polar may not use; anything else is a bug and keeps its traceback.
            if error.filename is None or os.environ.get("POLAR_DEBUG"):
                raise
            from polar.cli.console import complain

            complain(f"error: {error.filename}: {error.strerror}")
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
