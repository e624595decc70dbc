"""The tables of the benchmark."""

from collections.abc import Sequence

from rich.table import Table

from benchmarks.measure import CONCURRENCIES, Crowd, Lane, Results

REFERENCE = "polar chat"  # what ratios are to
MB = 2**20
Missing = dict[str, str]
"""Gateways that could not be measured, and why."""


def calls_table(lanes: Sequence[Lane], size: str, results: Results, missing: Missing) -> Table:
    """CPU of a call of one size, what it adds to the latency of a caller who is alone, and ratios."""
    table = Table("gateway", title=f"{size.capitalize()} calls, not streamed: CPU over the gateway's processes", min_width=110)
    headings = [f"CPU ms, {number} at a time" for number in CONCURRENCIES] + ["added ms, p50", "CPU ms, first call"]
    for heading in (*headings, *(f"× `{REFERENCE}`, {number} at a time" for number in CONCURRENCIES)):
        table.add_column(heading, justify="right")
    for lane in lanes:
        if lane.gateway is None:
            continue
        used = [results.cpu(lane.name, size, number) for number in CONCURRENCIES]
        engine = "engine ids" if lane.gateway.renders else "engine chat"
        added = results.p50(lane.name, size, 1) - results.p50(engine, size, 1)
        first = _ms(lane.first_cpu[size]) if lane.gateway.key else ""
        ratios = [_ratio(cpu, _reference(results, size, number)) for cpu, number in zip(used, CONCURRENCIES, strict=True)]
        table.add_row(lane.name, *map(_ms, used), _ms(added), first, *ratios)
    return _with(table, missing)


def _reference(results: Results, size: str, concurrency: int) -> float:
    known = (REFERENCE, size, concurrency) in results.whole
    return results.cpu(REFERENCE, size, concurrency) if known else 0.0


def streams_table(results: Results, missing: Missing) -> Table:
    """CPU of a streamed token."""
    table = Table("gateway", title="Streamed, small requests, 16 at a time, an event per token every 10 ms", min_width=60)
    table.add_column("CPU µs per token", justify="right")
    table.add_column(f"× `{REFERENCE}`", justify="right")
    for name in results.streamed:
        reference = results.per_token(REFERENCE) if REFERENCE in results.streamed else 0.0
        table.add_row(name, f"{1e6 * results.per_token(name):.0f}", _ratio(results.per_token(name), reference))
    return _with(table, missing)


def crowd_table(crowds: Sequence[Crowd], missing: Missing) -> Table:
    """Many sessions in flight."""
    table = Table("gateway", title="Sessions in flight at once, 100 KB each, held 4 s by the engine")
    for heading in ("sessions", "MB before", "MB at most", "p50 s", "slowest s", "CPU ms, first calls", "CPU ms", "errors"):
        table.add_column(heading, justify="right")
    for one in crowds:
        memory = f"{one.idle / MB:.0f}", f"{one.peak / MB:.0f}"
        errors = f"{len(one.errors)}: {one.errors[0][:60]}" if one.errors else "0"
        times = f"{one.p50:.2f}", f"{one.worst:.2f}"
        table.add_row(one.name, str(one.sessions), *memory, *times, _ms(one.first_cpu), _ms(one.cpu), errors)
    return _with(table, missing)


def _with(table: Table, missing: Missing) -> Table:
    for name, why in missing.items():
        table.add_row(name, why)
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds < 0.01 else f"{1000 * seconds:.1f}"


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.2f}" if reference else ""
