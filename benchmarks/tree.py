"""What a session's token tree costs: to append to, to build traces from, and to store; growth, and what simpler ways cost.

python -m benchmarks.tree          sessions of 10 to 1,000 calls, up to 128,000 tokens; about a minute
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from msgspec import structs
from rich.console import Console
from rich.table import Table

from benchmarks.histories import Shape, Turn, Written, prompt, session, texts, write
from polar.specs import BuilderName, HarnessProfile, SamplingSpec
from polar.store.capture import CaptureReader, CaptureStore, StoredSession
from polar.store.captured import captured
from polar.tokens.records import Call, Node, Position
from polar.tokens.tree import EMPTY, TokenTree, common_prefix
from polar.trajectory.builders import build
from polar.trajectory.forest import forest

SIZES = ((10, 10_000), (50, 32_000), (200, 100_000), (1_000, 128_000))
ROUNDS = 5
SESSIONS = 8  # in a capture file


@dataclass(frozen=True)
class Cost:
    """CPU in ms (of a whole session, where nothing else is said) and bytes of one session."""

    shape: Shape
    calls: int
    tokens: int
    append: float
    append_whole: float
    append_lists: float
    merge: float
    apart: float
    forest: float
    merge_lists: float
    read: float
    raw: int
    stored: int
    text: int
    copies: int


def measure(shape: Shape, calls: int, tokens: int) -> Cost:
    """All costs of one session; times are medians of `ROUNDS`."""
    turns = session(shape, calls, tokens)
    written = write(turns)
    nodes = written.tree.nodes
    raw = sum(len(node.ids) * (8 if node.kind == "sampled" else 4) for node in nodes)
    stored, read = store(written)
    return Cost(
        shape,
        calls,
        sum(len(node.ids) for node in nodes),
        cpu(lambda: append(turns)),
        append_whole(turns),
        append_lists(turns),
        cpu(lambda: traces(written, "prefix_merging")),
        cpu(lambda: traces(written, "per_request")),
        cpu(lambda: forest(written.captured, reward=1.0)),
        merge_lists(turns),
        read,
        raw,
        stored,
        texts(written),
        sum(4 * call.prompt_tokens + 8 * call.sampled for call in written.captured.calls),
    )


def cpu(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Milliseconds of one core."""

    def once() -> float:
        begun = time.thread_time()
        work()
        return 1000 * (time.thread_time() - begun)

    return median(once() for _ in range(rounds))


def append(turns: Sequence[Turn]) -> TokenTree:
    """As token-in mode does: each prompt is the path of the answer that it follows, and what is new."""
    tree, ends = TokenTree(), list[Position]()
    for number, turn in enumerate(turns):
        place = tree.add_context(ends[turn.follows] if turn.follows is not None else EMPTY, turn.new, f"c{number}")
        ends.append(tree.end(tree.add_sampled(place, turn.ids, turn.logprobs, (), f"c{number}", 0).node_id))
    return tree


def append_whole(turns: Sequence[Turn]) -> float:
    """As chat mode does: each prompt comes whole, and is held against the path of the answer that it follows."""
    tree, ends, spent = TokenTree(), list[Position](), 0.0
    for number, turn in enumerate(turns):
        ids = prompt(turns, number)
        begun = time.thread_time()
        start = ends[turn.follows] if turn.follows is not None else EMPTY
        same = common_prefix(tree.path(start), ids)
        place = tree.add_context(start, ids[same:], f"c{number}")
        ends.append(tree.end(tree.add_sampled(place, turn.ids, turn.logprobs, (), f"c{number}", 0).node_id))
        spent += time.thread_time() - begun
    return 1000 * spent


def append_lists(turns: Sequence[Turn]) -> float:
    """Full copies: every call keeps its prompt and its answer as lists."""
    spent = 0.0
    for number, turn in enumerate(turns):
        ids = prompt(turns, number)
        begun = time.thread_time()
        _ = (ids.tolist(), turn.ids.tolist(), turn.logprobs.tolist())
        spent += time.thread_time() - begun
    return 1000 * spent


def traces(written: Written, builder: BuilderName) -> object:
    """What a builder makes of the session."""
    return build(written.captured, builder=builder, status="completed", reward=1.0)


def merge_lists(turns: Sequence[Turn]) -> float:
    """The obvious merge: a call whose prompt begins with a trace goes on with it, any other begins a trace."""
    merged: list[tuple[list[int], list[int], list[float]]] = []
    spent = 0.0
    for number, turn in enumerate(turns):
        ids, reply, logprobs = prompt(turns, number).tolist(), turn.ids.tolist(), turn.logprobs.tolist()
        begun = time.thread_time()
        going_on = [trace for trace in merged if ids[: len(trace[0])] == trace[0]]
        if not going_on:
            merged.append(([], [], []))
        whole, mask, values = (going_on or merged[-1:])[0]
        new = ids[len(whole) :]
        whole += new + reply
        mask += [0] * len(new) + [1] * len(reply)
        values += [0.0] * len(new) + logprobs
        spent += time.thread_time() - begun
    return 1000 * spent


def store(written: Written) -> tuple[int, float]:
    """Bytes of a session in a capture file at rest that has `SESSIONS` such, and ms to read one back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "capture.sqlite"
        asyncio.run(_commit(path, written))
        reader = CaptureReader.open(path)
        read = cpu(lambda: captured(reader, "s1"), 2)
        reader.close()
        return path.stat().st_size // SESSIONS - texts(written), read


async def _commit(path: Path, written: Written) -> None:
    """Write sessions side by side, as a worker does; each has messages of its own."""
    store = CaptureStore.open(path)
    for number in range(SESSIONS):
        session = StoredSession(f"s{number}", "ab" * 32, "t", HarnessProfile(), SamplingSpec(), "policy", "qwen3", 1.7e9)
        await store.open_session(session)
    for commit in written.commits:
        await asyncio.gather(*(store.commit(f"s{number}", *_for_session(number, *commit)) for number in range(SESSIONS)))
    await store.close()


def _for_session(
    number: int, nodes: Sequence[Node], call: Call, messages: Mapping[str, bytes]
) -> tuple[Sequence[Node], list[Call], dict[str, bytes]]:
    """A commit as one of session `number`, whose messages have addresses that no other session's have."""
    hashes = tuple(f"{number:02x}{value[2:]}" for value in call.message_hashes)
    record = structs.replace(
        call, session_id=f"s{number}", message_hashes=hashes, tools_hash=f"{number:02x}{call.tools_hash[2:]}"
    )
    return nodes, [record], {f"{number:02x}{value[2:]}": body for value, body in messages.items()}


def times_table(costs: Sequence[Cost]) -> Table:
    """CPU of a session."""
    table = Table(title="CPU ms of a session on one core", min_width=120)
    headings = (
        "session|calls|tokens|append|append, whole prompts|append, full lists|merge|per request|forest|naive merge|read back"
    )
    for heading in headings.split("|"):
        table.add_column(heading, justify="right")
    for cost in costs:
        numbers = (
            cost.append,
            cost.append_whole,
            cost.append_lists,
            cost.merge,
            cost.apart,
            cost.forest,
            cost.merge_lists,
            cost.read,
        )
        table.add_row(cost.shape, f"{cost.calls:,}", f"{cost.tokens:,}", *(f"{number:.1f}" for number in numbers))
    return table


def bytes_table(costs: Sequence[Cost]) -> Table:
    """Bytes of a session at rest."""
    table = Table(title=f"kB of a session in a capture file of {SESSIONS} such, without what was said", min_width=120)
    for heading in "session|calls|tokens|stored|of 8 B a token|of raw|what was said|full copies|of stored".split("|"):
        table.add_column(heading, justify="right")
    for cost in costs:
        stored = f"{cost.stored / 1000:,.0f}", f"{cost.stored / (8 * cost.tokens):.2f}", f"{cost.stored / cost.raw:.2f}"
        others = f"{cost.text / 1000:,.0f}", f"{cost.copies / 1000:,.0f}", f"{cost.copies / cost.stored:.0f}"
        table.add_row(cost.shape, f"{cost.calls:,}", f"{cost.tokens:,}", *stored, *others)
    return table


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    console = Console(width=160)
    costs = [measure(shape, calls, tokens) for shape in ("chain", "busy") for calls, tokens in SIZES]
    console.print(times_table(costs))
    console.print(bytes_table(costs))


if __name__ == "__main__":
    main()
