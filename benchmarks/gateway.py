"""What a gateway costs: Polar's in every dialect, and peers, before the same engine and under the same load, in one run.

python -m benchmarks.gateway                       CPU, added latency, streaming; about five minutes
python -m benchmarks.gateway --sessions 1000       memory and latency with many sessions in flight
python -m benchmarks.gateway --profile             where the time of Polar's gateway goes (--gateways polar or token-in)
python -m benchmarks.gateway --install-peers       only install the peers into $POLAR_CACHE/bench
"""

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks import peers
from benchmarks.bodies import CHAT, DIALECTS, SIZES
from benchmarks.load import Callers
from benchmarks.measure import (
    CONCURRENCIES,
    Crowd,
    Lane,
    Results,
    crowd,
    lane,
    round_of_calls,
    round_of_streams,
    straight,
)
from benchmarks.peers import STARTERS, Engine, NotInstalled
from benchmarks.tables import Missing, calls_table, crowd_table, streams_table
from polar.engines.embedded.models import resolve

NOTE = """\
`polar` is the gateway in chat mode: the engine renders, as it does for the peers, and tells the ids; `token-in` renders and
encodes what is new in a prompt itself, and splices the stored ids of the history. Both check what was sampled, and have it
on disk before the reply. rLLM's gateway captures what the engine says; LiteLLM and nginx capture nothing. The engine is a
stub that answers at once."""
PROFILE_SECONDS = 5.0
OPEN_FILES = 16_384  # a thousand callers need more than the usual thousand


@dataclass(frozen=True)
class Options:
    """What to measure; see `--help`."""

    gateways: Sequence[str]
    dialects: Sequence[str]
    sizes: Sequence[str]
    rounds: int
    seconds: float
    sessions: int


@contextlib.asynccontextmanager
async def stub_engine() -> AsyncIterator[Engine]:
    """The stub in a process of its own."""
    model_dir = resolve("smollm2")
    with peers.child([sys.executable, "-m", "benchmarks.stub", str(model_dir)]) as process:
        yield Engine(int(await peers.first_line(process)), model_dir)


async def compare(options: Options, console: Console) -> None:
    """The tables of calls and streams."""
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(stub_engine())
        lanes, missing = await _lanes(options, engine, stack)
        results = Results()
        for number in range(options.rounds):
            console.print(f"round {number + 1} of {options.rounds}", style="dim")
            await round_of_calls(lanes, options.sizes, options.seconds, results)
            await round_of_streams(lanes, engine.port, results)
    for size in options.sizes:
        console.print(calls_table(lanes, size, results, missing))
    console.print(streams_table(results, missing))


async def _lanes(options: Options, engine: Engine, stack: contextlib.AsyncExitStack) -> tuple[list[Lane], Missing]:
    """All ways to the engine, and the gateways that are not there."""
    lanes: list[Lane] = []
    missing: Missing = {}
    for name in options.gateways:
        try:
            gateway = await stack.enter_async_context(STARTERS[name](engine, _scratch(stack)))
        except NotInstalled as error:
            missing[name] = str(error)
            continue
        dialects = [dialect for dialect in DIALECTS if dialect.name in options.dialects] if gateway.key else [CHAT]
        lanes += [await lane(gateway, dialect, options.sizes) for dialect in dialects]
    return lanes + await straight(engine.port, options.sizes), missing


async def crowds(options: Options, console: Console) -> None:
    """The table of many sessions in flight; each gateway alone and fresh."""
    measured: list[Crowd] = []
    missing: Missing = {}
    for name in options.gateways:
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(stub_engine())
            try:
                gateway = await stack.enter_async_context(STARTERS[name](engine, _scratch(stack)))
            except NotInstalled as error:
                missing[name] = str(error)
                continue
            measured.append(await crowd(gateway, engine.port, options.sessions))
    console.print(crowd_table(measured, missing))


async def profile(options: Options) -> None:
    """Print the functions that take most of the gateway's own time, in each dialect and size asked for."""
    for dialect in [dialect for dialect in DIALECTS if dialect.name in options.dialects]:
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(stub_engine())
            gateway = await stack.enter_async_context(STARTERS[options.gateways[0]](engine, _scratch(stack)))
            for size in options.sizes:
                made = await lane(gateway, dialect, [size])
                print(f"{dialect.name}, {size}, {max(CONCURRENCIES)} at a time", flush=True)
                gateway.process.send_signal(signal.SIGUSR1)
                load = await Callers(made.port, made.whole[size], max(CONCURRENCIES)).for_seconds(PROFILE_SECONDS)
                gateway.process.send_signal(signal.SIGUSR1)
                await asyncio.sleep(1.0)
                print(f"{load.calls} calls", flush=True)


def _scratch(stack: contextlib.AsyncExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polar-bench-")))


def _allow_open_files() -> None:
    """For this process and those that it starts, as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=f"{__doc__}\n{NOTE}", formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [dialect.name for dialect in DIALECTS]
    parser.add_argument("--install-peers", action="store_true", help="install the peers and end")
    parser.add_argument("--profile", action="store_true", help="profile Polar's gateway instead")
    parser.add_argument("--sessions", type=int, default=0, metavar="N", help="measure N sessions in flight instead")
    parser.add_argument("--gateways", nargs="+", default=list(STARTERS), choices=list(STARTERS))
    parser.add_argument("--dialects", nargs="+", default=names, choices=names, help="of Polar's gateway; peers are asked in chat")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    arguments = vars(parser.parse_args())
    installs, profiles = arguments.pop("install_peers"), arguments.pop("profile")
    options = Options(**arguments)
    console = Console(width=max(150, Console().width))
    _allow_open_files()
    if installs:
        try:
            peers.install_all()
        except NotInstalled as error:
            sys.exit(str(error))
    elif profiles:
        asyncio.run(profile(options))
    else:
        asyncio.run(crowds(options, console) if options.sessions else compare(options, console))
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        console.print(NOTE)
        console.print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, load {load}; {options}")


if __name__ == "__main__":
    main()
