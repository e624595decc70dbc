"""What a run shows while it runs: a live display on a terminal, a line every few seconds elsewhere."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polar.cli.console import count, plain
from polar.specs import SessionResult, Stage

LINE_EVERY = 5.0  # seconds between lines where there is no terminal
BUSY: tuple[Stage, ...] = ("queued", "preparing", "ready", "running", "scoring")


class Progress:
    """Counts what a run reports; satisfies `Observer`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._sessions = 0
        self._done = 0
        self._stages: dict[str, Stage] = {}
        self._solved: list[bool] = []
        self._failed = 0
        self._tokens = 0

    def note(self, line: str) -> None:
        self._console.print(plain(line, "dim"), soft_wrap=True)

    def planned(self, sessions: int, finished: int) -> None:
        self._sessions, self._done = sessions, finished
        if finished:
            self.note(f"{finished} of {sessions} sessions are finished already; going on with the others")

    def stage(self, session_id: str, task_id: str, sample: int, stage: Stage) -> None:
        self._stages[session_id] = stage

    def finished(self, result: SessionResult) -> None:
        self._stages.pop(result.session_id, None)
        self._tokens += result.accounting.sampled
        if result.reward is None:
            self._failed += 1
        else:
            self._done += 1
            self._solved.append(result.solved)

    @property
    def line(self) -> str:
        """All in one line."""
        stages = Counter(self._stages.values())
        parts = [f"{self._done}/{self._sessions} sessions"]
        parts += [f"{stages[stage]} {stage}" for stage in BUSY if stages[stage]]
        parts.append(f"{count(self._tokens)} tokens sampled")
        if self._solved:
            parts.append(f"pass rate {sum(self._solved) / len(self._solved):.2f}")
        if self._failed:
            parts.append(f"{self._failed} failed")
        seconds = int(time.monotonic() - self._started)
        return " · ".join([*parts, f"{seconds // 60}:{seconds % 60:02}"])

    def __rich__(self) -> RenderableType:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(max(self._sessions, 1), self._done, width=40), Text(f"{self._done}/{self._sessions}"))
        return Group(Text(self.line), bar)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it on a terminal while the block runs; what else is printed meanwhile goes above."""
        if not self._console.is_terminal:
            yield
            return
        with Live(self, console=self._console, refresh_per_second=4, transient=True):
            yield

    @asynccontextmanager
    async def told(self) -> AsyncIterator[None]:
        """Where there is no terminal, print a line every few seconds while the block runs."""
        if self._console.is_terminal:
            yield
            return
        teller = asyncio.create_task(self._tell())
        try:
            yield
        finally:
            teller.cancel()

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(LINE_EVERY)
            if self._stages:
                self._console.print(Text(self.line), soft_wrap=True)
