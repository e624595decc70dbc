"""Traces and forests as safetensors: arrays laid end to end, in a file that is written session by session."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from polar.errors import UsageError
from polar.specs import NO_EXTRAS, Branch, CallKind, Extras, Trace
from polar.trajectory.builders import spans_of
from polar.trajectory.chains import Sampling
from polar.trajectory.checking import bounds_fault, forest_fault, trace_fault
from polar.trajectory.export import Exported, Placed, sampling_json, token_versions
from polar.trajectory.forest import NONE, Forest, joined, stacked

Arrays = Mapping[str, NDArray[np.generic]]
ReadArrays = Mapping[str, NDArray[Any]]  # their types are those of the file's columns
Item = TypeVar("Item", contravariant=True)
Listed = TypeVar("Listed")
Spool = Callable[[], BinaryIO]
_DTYPES = {"uint8": "U8", "int32": "I32", "int64": "I64", "float32": "F32", "float64": "F64"}
_DTYPES |= {"int8": "I8", "int16": "I16", "float16": "F16"}  # of extras
EXTRAS = "extras."  # begins the names of tensors that hold `Forest.extras`
_CHUNK = 1 << 20  # bytes


class _Calls(Struct, frozen=True):
    """What a header says of the calls of a trace."""

    call_ids: tuple[str, ...]
    finish_reason: str
    kind: CallKind
    parent_trace: int | None


class _Header(Struct):
    """The part of a safetensors header that is not of a tensor."""

    metadata: dict[str, str] = field(name="__metadata__", default_factory=dict)


class Columns(Protocol[Item]):
    """What becomes a file: the arrays that each item adds, and what the header says of them all."""

    def begin(self) -> Arrays:
        """What each array starts with, if only its type."""
        ...

    def add(self, item: Item) -> Arrays:
        """What `item` adds to each array; what `begin` does not name is a tensor of its own, of any shape."""
        ...

    def metadata(self) -> dict[str, str]:
        """Texts of the header, once every item is there."""
        ...


class TensorFile(Generic[Item]):
    """A safetensors file in the making. Its header says how long each array is, so until the end each has a spool of its own."""

    def __init__(self, columns: Columns[Item], spool: Spool) -> None:
        """`spool` opens an empty file to write and read back, in memory or on disk."""
        begin = columns.begin()
        self._columns = columns
        self._types = {name: array.dtype for name, array in begin.items()}
        self._lengths = dict.fromkeys(begin, 0)
        self._spools = {name: spool() for name in begin}
        self._own: dict[str, NDArray[np.generic]] = {}  # by name, an array of no bytes in the type and shape of the tensor
        self._own_spool = spool()
        self._append(begin)

    def add(self, item: Item) -> None:
        """Write what `item` adds."""
        self._append(self._columns.add(item))

    def pour(self, file: BinaryIO) -> None:
        """Write the whole file, and close the spools."""
        names = sorted(self._types, key=lambda name: (-self._types[name].itemsize, name))  # wide ones first: all are aligned
        file.write(self._header(names))
        for spool in (*(self._spools[name] for name in names), self._own_spool):
            with spool:
                spool.seek(0)
                while chunk := spool.read(_CHUNK):
                    file.write(chunk)

    def _append(self, arrays: Arrays) -> None:
        for name, array in arrays.items():
            if name not in self._types:
                self._own[name] = np.broadcast_to(np.zeros((), array.dtype), array.shape)
                self._own_spool.write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
                continue
            self._spools[name].write(np.ascontiguousarray(array, self._types[name].newbyteorder("<")).data)
            self._lengths[name] += len(array)

    def _header(self, names: Sequence[str]) -> bytes:
        header: dict[str, object] = {"__metadata__": self._columns.metadata()}
        end = 0
        for name in names:
            start, end = end, end + self._lengths[name] * self._types[name].itemsize
            header[name] = {
                "dtype": _DTYPES[self._types[name].name],
                "shape": [self._lengths[name]],
                "data_offsets": [start, end],
            }
        for name, like in self._own.items():
            start, end = end, end + like.size * like.itemsize
            header[name] = {"dtype": _DTYPES[like.dtype.name], "shape": like.shape, "data_offsets": [start, end]}
        text = msgspec.json.encode(header)
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


TRACE_ARRAYS: Mapping[str, type[np.generic]] = {
    "input_ids": np.int32,
    "loss_mask": np.uint8,
    "logprobs": np.float32,
    "policy_versions": np.int32,
    "cu_seqlens": np.int64,
    "prompt_lengths": np.int32,
    "rewards": np.float64,
    "weights": np.float64,
}


class TraceTensors:
    """Traces: n of them with t tokens in all.

    Tensors: `input_ids` int32[t] (prompt then response), `loss_mask` uint8[t], `logprobs` float32[t] (0 where the mask is 0),
    `policy_versions` int32[t] (-1 where the mask is 0), `cu_seqlens` int64[n + 1], `prompt_lengths` int32[n], `rewards`
    float64[n] (NaN for none), `weights` float64[n].

    The header has JSON lists, one entry a trace: `traces` of [session_id, task_id, sample, trace], `sampling` of
    {temperature, top_p, top_k, logprobs_mode}, `calls` of {call_ids, finish_reason, kind, parent_trace}.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._names: list[tuple[str, str, int, int]] = []
        self._sampling: list[dict[str, object]] = []
        self._calls: list[_Calls] = []

    def begin(self) -> Arrays:
        return {name: np.zeros(int(name == "cu_seqlens"), dtype) for name, dtype in TRACE_ARRAYS.items()}

    def add(self, item: Exported) -> Arrays:
        traces, result = item.trajectory.traces, item.result
        self._names += [(result.session_id, result.task_id, result.sample, index) for index in range(len(traces))]
        self._sampling += [sampling_json(trace) for trace in traces]
        self._calls += [
            _Calls(trace.call_ids, trace.finish_reason, trace.branch.kind, trace.branch.parent_trace) for trace in traces
        ]
        ends = self._tokens + np.cumsum([len(trace.prompt_ids) + len(trace.response_ids) for trace in traces], dtype=np.int64)
        self._tokens = int(ends[-1]) if traces else self._tokens
        return {
            "input_ids": joined([part for trace in traces for part in (trace.prompt_ids, trace.response_ids)], np.int32),
            "loss_mask": joined([_padded(trace, trace.loss_mask, 0) for trace in traces], np.uint8),
            "logprobs": joined([_padded(trace, trace.response_logprobs, 0) for trace in traces], np.float32),
            "policy_versions": joined([_padded(trace, token_versions(trace), NONE) for trace in traces], np.int32),
            "cu_seqlens": ends,
            "prompt_lengths": np.asarray([len(trace.prompt_ids) for trace in traces], np.int32),
            "rewards": np.asarray([np.nan if trace.reward is None else trace.reward for trace in traces], np.float64),
            "weights": np.asarray([trace.weight for trace in traces], np.float64),
        }

    def metadata(self) -> dict[str, str]:
        lists = {"traces": self._names, "sampling": self._sampling, "calls": self._calls}
        return {"format": "polar.traces.1"} | {name: _text(value) for name, value in lists.items()}


def read_tensors(data: bytes) -> list[Placed]:
    """The traces of a file of `TraceTensors`, without their messages and tools, which are not in it.

    Raises:
        UsageError: it is no such file, or was cut or changed.
    """
    arrays, texts = _read(data, "polar.traces.1", TRACE_ARRAYS)
    names = _list(texts, "traces", tuple[str, str, int, int])
    sampling, calls = _list(texts, "sampling", Sampling), _list(texts, "calls", _Calls)
    tokens = [arrays[name] for name in ("input_ids", "loss_mask", "logprobs", "policy_versions")]
    rows = [arrays[name] for name in ("prompt_lengths", "rewards", "weights")]
    _refuse(bounds_fault(arrays["cu_seqlens"], tokens, (*rows, names, sampling, calls)))
    bounds = arrays["cu_seqlens"].tolist()
    traces = [
        _cut(arrays, number, slice(start, end), how, about)
        for number, (start, end, how, about) in enumerate(zip(bounds[:-1], bounds[1:], sampling, calls, strict=True))
    ]
    return [Placed(*name, trace) for name, trace in zip(names, traces, strict=True)]


def _cut(arrays: ReadArrays, number: int, tokens: slice, how: Sampling, about: _Calls) -> Trace:
    ids, mask, versions = (arrays[name][tokens] for name in ("input_ids", "loss_mask", "policy_versions"))
    prompt, reward = int(arrays["prompt_lengths"][number]), float(arrays["rewards"][number])
    logprobs = arrays["logprobs"][tokens]
    if not 0 <= prompt < len(ids) or mask[:prompt].any() or logprobs[:prompt].any() or (versions[mask == 0] != NONE).any():
        _refuse(f"trace {number} trains something of its prompt, or has versions where it trains nothing")
    trace = Trace(
        prompt_ids=ids[:prompt],
        response_ids=ids[prompt:],
        loss_mask=mask[prompt:],
        response_logprobs=logprobs[prompt:],
        policy_versions=spans_of(versions[mask == 1]),
        call_ids=about.call_ids,
        prompt_messages=(),
        response_messages=(),
        tools=(),
        finish_reason=about.finish_reason,
        temperature=how.temperature,
        top_p=how.top_p,
        top_k=how.top_k,
        logprobs_mode=how.logprobs_mode,
        reward=None if np.isnan(reward) else reward,
        weight=float(arrays["weights"][number]),
        branch=Branch(about.kind, about.parent_trace),
    )
    if fault := trace_fault(trace):
        _refuse(f"trace {number}: {fault}")
    return trace


def _read(data: bytes, form: str, types: Mapping[str, type[np.generic]]) -> tuple[ReadArrays, dict[str, str]]:
    """The tensors of a file, which has them all in their types, and the texts of its header."""
    try:
        arrays = load(data)
    except SafetensorError as error:
        raise UsageError(f"expected a safetensors file of {form}: {error}") from None
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    texts = msgspec.json.decode(header, type=_Header).metadata
    if (found := texts.get("format", "one of somebody else")) != form:
        raise UsageError(f"expected a safetensors file of {form}, got {found}")
    for name, dtype in types.items():
        if name not in arrays or arrays[name].dtype != dtype or arrays[name].ndim != 1:
            _refuse(f"`{name}` is to be an array of {np.dtype(dtype)}")
    return arrays, texts


def _list(texts: Mapping[str, str], name: str, kind: type[Listed]) -> list[Listed]:
    """A list of the header."""
    try:
        return msgspec.json.decode(texts.get(name, ""), type=list[kind])  # type: ignore[valid-type]
    except msgspec.MsgspecError as error:
        raise UsageError(f"the file is not as `polar export` wrote it: `{name}` in its header: {error}") from None


def _refuse(fault: str) -> None:
    if fault:
        raise UsageError(f"the file is not as `polar export` wrote it: {fault}")


def _padded(trace: Trace, values: NDArray[np.generic], fill: int) -> NDArray[np.generic]:
    return np.concatenate([np.full(len(trace.prompt_ids), fill, values.dtype), values])


FOREST_ARRAYS: Mapping[str, type[np.generic]] = {
    "ids": np.int32,
    "positions": np.int32,
    "loss_mask": np.uint8,
    "logprobs": np.float32,
    "policy_versions": np.int32,
    "bounds": np.int64,
    "parents": np.int32,
    "sampled": np.uint8,
    "traces": np.int32,
    "weights": np.float64,
    "samplings": np.int32,
    "sessions": np.int32,
    "choices": np.int32,
    "rewards": np.float64,
}


class ForestTensors:
    """Forests side by side, as one: each array of `Forest` is a tensor of its name, and nothing is shared between the items.

    Extras of an item are tensors of their own, `extras.NAME.S`, where S is the place of the item's first session: of a width that
    differs, only its own is written.

    The header has JSON lists: `session_ids`, `call_ids` one a node, `sampling`.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._call_ids: list[str] = []
        self._session_ids: list[str] = []
        self._sampling: list[Sampling] = []

    def begin(self) -> Arrays:
        return {name: np.zeros(int(name == "bounds"), dtype) for name, dtype in FOREST_ARRAYS.items()}

    def add(self, item: Forest) -> Arrays:
        arrays: dict[str, NDArray[np.generic]] = {name: getattr(item, name) for name in FOREST_ARRAYS}
        arrays["bounds"] = item.bounds[1:] + self._tokens
        arrays["parents"] = _moved(item.parents, len(self._call_ids))
        arrays["samplings"] = _moved(item.samplings, len(self._sampling))
        arrays["sessions"] = item.sessions + len(self._session_ids)
        arrays |= {f"{EXTRAS}{name}.{len(self._session_ids)}": rows for name, rows in item.extras.items()}
        self._tokens += len(item.ids)
        self._call_ids += item.call_ids
        self._session_ids += item.session_ids
        self._sampling += item.sampling
        return arrays

    def metadata(self) -> dict[str, str]:
        lists = {"session_ids": self._session_ids, "call_ids": self._call_ids, "sampling": self._sampling}
        return {"format": "polar.forest.1"} | {name: _text(value) for name, value in lists.items()}


def read_forest(data: bytes) -> Forest:
    """The forest of a file of `ForestTensors`: all its sessions side by side.

    Raises:
        UsageError: it is no such file, or was cut or changed.
    """
    arrays, texts = _read(data, "polar.forest.1", FOREST_ARRAYS)
    columns: dict[str, Any] = {name: arrays[name] for name in FOREST_ARRAYS}
    forest = Forest(
        **columns,
        call_ids=tuple(_list(texts, "call_ids", str)),
        sampling=tuple(_list(texts, "sampling", Sampling)),
        session_ids=tuple(_list(texts, "session_ids", str)),
    )
    _refuse(forest_fault(forest))
    return replace(forest, extras=_extras(forest, arrays))


def _extras(forest: Forest, arrays: ReadArrays) -> Extras:
    """The extras of all items; what an item has none of is left open."""
    items: dict[int, dict[str, NDArray[np.generic]]] = {}
    for name in (name for name in arrays if name.startswith(EXTRAS)):
        kind, _, first = name.removeprefix(EXTRAS).rpartition(".")
        _refuse("" if kind and first.isdecimal() and arrays[name].ndim else f"`{name}` is no tensor of extras")
        items.setdefault(int(first), {})[kind] = arrays[name]
    sessions = np.repeat(forest.sessions, np.diff(forest.bounds))[forest.loss_mask == 1]
    parts: list[tuple[int, Extras]] = []
    for session, extras in sorted(items.items()):
        before = int((sessions < session).sum()) - sum(length for length, _ in parts)
        told = {len(rows) for rows in extras.values()}
        _refuse("" if before >= 0 and len(told) == 1 else f"the extras of session {session} are not of its trained tokens")
        parts += [(before, NO_EXTRAS), (told.pop(), extras)]
    rest = len(sessions) - sum(length for length, _ in parts)
    _refuse("" if rest >= 0 else "there are extras of more tokens than are trained")
    return stacked([*parts, (rest, NO_EXTRAS)])


def _moved(places: NDArray[np.int32], by: int) -> NDArray[np.int32]:
    return np.where(places == NONE, NONE, places + by).astype(np.int32)


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
