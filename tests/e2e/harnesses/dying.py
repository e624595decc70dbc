"""A harness that dies while its policy speaks."""

import asyncio
import time

from polar.engines.script import Scripted, ScriptedCall
from tests.e2e.harnesses.rig import Seen, Stand, exact


def slow(_: ScriptedCall) -> Scripted:
    """Some ten seconds of talk."""
    return Scripted("one two three four five six " * 40, delay_per_token=0.05)


class Killer:
    """Kills the harness with all its processes when some tokens are there; `at` is when, in unix seconds."""

    at = 0.0

    async def __call__(self, stand: Stand) -> None:
        await stand.asked(1)
        while len(stand.engine.log[0].ids) < 10:
            await asyncio.sleep(0.01)
        harness = stand.harness()
        self.at = time.time()
        for process in (*harness.children(recursive=True), harness):
            process.kill()


def check_stopped_at_once(seen: Seen, killer: Killer, *, within: float = 0.1) -> None:
    """The engine was told `within` seconds, and what it had sampled is recorded and not trained."""
    (generation,) = seen.log
    assert generation.aborted_at is not None
    assert generation.aborted_at - killer.at < within
    (call,) = seen.calls
    assert call.status == "aborted"
    assert 10 <= call.sampled <= len(generation.ids)
    assert seen.trajectory.traces == ()
    exact(seen)
