"""Several replicas of one model as one engine.

A session stays on the replica that has its prefix; a new one goes where the fewest calls run. A replica that is dead is taken
out and asked now and then until it is back; its calls go elsewhere only if nothing of them was delivered.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from msgspec import Struct, structs

from polar.chat import ChatRequest
from polar.engines.protocol import (
    AdapterControl,
    Chatted,
    CountsPrompts,
    Engine,
    EngineInfo,
    Generated,
    LogprobsMode,
    PauseMode,
    ResolvedSampling,
    WeightControl,
)
from polar.errors import EngineError, EngineRefusal, UsageError
from polar.specs import Float32Array, Int32Array
from polar.tokens.tree import common_prefix

REMEMBERED = 1024  # sessions whose home, and last prompt and reply there, are known
ALIVE_SECONDS = 5.0  # within which a replica must say what it is
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between two looks at a dead replica

T = TypeVar("T")
Piece = TypeVar("Piece", Generated, Chatted)


class ReplicaStats(Struct, frozen=True):
    """What a replica has done.

    Attributes:
        running: calls in flight.
        calls: that it was given, `moved` of them were taken elsewhere when it died.
        prompt_tokens: of those calls; of these `known_tokens` stood already at the start of what it had last seen of the same
            session, so that its prefix cache may hold them.
    """

    name: str
    alive: bool
    running: int
    calls: int
    moved: int
    prompt_tokens: int
    known_tokens: int

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that the replica had seen."""
        return self.known_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(eq=False)
class _Replica:
    name: str
    engine: Engine
    alive: bool = True
    running: set[str] = field(default_factory=set)
    calls: int = 0
    moved: int = 0
    prompt_tokens: int = 0
    known_tokens: int = 0
    revival: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class _Told:
    """What the replicas were told of weights."""

    weights: str = ""
    version: int | None = None
    adapter: tuple[str, int] | None = None
    paused: PauseMode | None = None


@dataclass
class _Home:
    """Where a session lives, and what was last seen of it there."""

    replica: _Replica
    seen: Int32Array


class EnginePool:
    """Satisfies `Engine`, and `WeightControl` where the replicas do.

    Args:
        engines: at least one, by a name to show.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._replicas = [_Replica(name, engine) for name, engine in engines.items()]
        self._homes: OrderedDict[str, _Home] = OrderedDict()
        self._model: EngineInfo | None = None
        self._told = _Told()
        self.name = self._replicas[0].engine.name

    @property
    def logprobs_mode(self) -> LogprobsMode:
        return self._replicas[0].engine.logprobs_mode

    @logprobs_mode.setter
    def logprobs_mode(self, mode: LogprobsMode) -> None:
        for replica in self._replicas:
            replica.engine.logprobs_mode = mode

    def stats(self) -> tuple[ReplicaStats, ...]:
        """What each replica has done."""
        return tuple(
            ReplicaStats(each.name, each.alive, len(each.running), each.calls, each.moved, each.prompt_tokens, each.known_tokens)
            for each in self._replicas
        )

    async def generate(
        self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Generated, None]:
        """As `Engine.generate`, on one of the replicas."""
        call = _Call(request_id, session_id, prompt_ids)

        def ask(engine: Engine) -> AsyncGenerator[Generated, None]:
            return engine.generate(request_id, prompt_ids, sampling, session_id=session_id)

        async with aclosing(self._stream(call, ask)) as pieces:
            async for piece in pieces:
                yield piece

    async def chat(
        self, request_id: str, request: ChatRequest, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Chatted, None]:
        """As `Engine.chat`, on one of the replicas."""
        call = _Call(request_id, session_id)

        def ask(engine: Engine) -> AsyncGenerator[Chatted, None]:
            return engine.chat(request_id, request, sampling, session_id=session_id)

        async with aclosing(self._stream(call, ask)) as pieces:
            async for piece in pieces:
                yield piece

    async def abort(self, request_id: str) -> None:
        """Stop a generation where it runs; an unknown id is no error."""
        for replica in self._replicas:
            if request_id in replica.running:
                await replica.engine.abort(request_id)

    async def info(self) -> EngineInfo:
        """What all replicas that answer say of themselves.

        Raises:
            EngineError: none answers.
            UsageError: they serve different models.
        """
        infos = {each.name: info for each in self._replicas if each.alive and (info := await self._ask_info(each)) is not None}
        if not infos:
            raise self._nobody()
        for name, info in infos.items():
            self._model = self._model or info
            if not _same(info, self._model):
                raise UsageError(
                    f"--engine: replicas must serve one model; {name} serves {info.model} with a context of {info.max_model_len} "
                    f"tokens, another serves {self._model.model} with {self._model.max_model_len}"
                )
        assert self._model is not None
        able = {name: all(getattr(info, name) for info in infos.values()) for name in ("constrains", "scores", "chats")}
        return structs.replace(self._model, **able)

    async def count_prompt(self, request: ChatRequest) -> int:
        """As `CountsPrompts.count_prompt`, on any replica.

        Raises:
            EngineRefusal: the replicas do not count.
        """

        def ask(engine: Engine) -> Awaitable[int]:
            if not isinstance(engine, CountsPrompts):
                raise EngineRefusal(f"the engine {engine.name} does not count the tokens of messages")
            return engine.count_prompt(request)

        return await self._anywhere(ask)

    async def tokenize(self, text: str) -> Int32Array:
        """As `Engine.tokenize`, on any replica."""
        return await self._anywhere(lambda engine: engine.tokenize(text))

    async def score(self, ids: Int32Array) -> Float32Array:
        """As `Engine.score`, on any replica."""
        return await self._anywhere(lambda engine: engine.score(ids))

    async def close(self) -> None:
        """Give back connections."""
        for replica in self._replicas:
            if replica.revival is not None:
                replica.revival.cancel()
        await asyncio.gather(*(replica.engine.close() for replica in self._replicas))

    @property
    def salts_prefixes(self) -> bool:
        """Whether all replicas do."""
        engines = [replica.engine for replica in self._replicas]
        return all(isinstance(engine, WeightControl) and engine.salts_prefixes for engine in engines)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling, on all replicas."""
        self._told = replace(self._told, paused=mode)
        await self._everywhere(lambda control: control.pause(mode))

    async def resume(self) -> None:
        """Go on sampling, on all replicas."""
        self._told = replace(self._told, paused=None)
        await self._everywhere(lambda control: control.resume())

    async def reload_weights(self, path: str) -> None:
        """Load the weights from directory `path`, on all replicas; one that comes back loads them first."""
        self._told = replace(self._told, weights=path)
        await self._everywhere(lambda control: control.reload_weights(path))

    async def update_version(self, version: int) -> None:
        """Name the weights that sample from now on, on all replicas."""
        self._told = replace(self._told, version=version)
        await self._everywhere(lambda control: control.update_version(version))

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, on all replicas (W02)."""
        self._forget_seen()
        await self._everywhere(lambda control: control.reset_prefix_cache())

    @property
    def adapters(self) -> tuple[str, ...]:
        """Directories of adapters that calls on any replica need, as a dead one will when it is back."""
        engines = [each.engine for each in self._replicas if isinstance(each.engine, AdapterControl)]
        return tuple(path for engine in engines for path in engine.adapters)

    async def load_adapter(self, path: str, version: int) -> None:
        """Have calls begin with an adapter, on all replicas; one that comes back loads it first."""
        self._told = replace(self._told, adapter=(path, version))
        self._forget_seen()
        await self._everywhere(lambda control: _load_adapter(control, path, version))

    def _forget_seen(self) -> None:
        for home in self._homes.values():
            home.seen = home.seen[:0]

    async def _stream(self, call: "_Call", ask: Callable[[Engine], AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
        """Each replica is asked once at most, the next one only when the last was found dead and had delivered nothing."""
        tried: set[_Replica] = set()
        while True:
            replica = self._choose(call.session_id, tried)
            tried.add(replica)
            replica.running.add(call.request_id)
            replica.calls += 1
            try:
                async with aclosing(ask(replica.engine)) as pieces:
                    async for piece in pieces:
                        call.take(piece)
                        yield piece
                self._count(call, replica)
                return
            except EngineRefusal:
                raise
            except EngineError:
                if await self._is_alive(replica) or call.delivered or len(tried) == len(self._replicas):
                    raise
                replica.moved += 1
            finally:
                replica.running.discard(call.request_id)

    def _choose(self, session_id: str, tried: set[_Replica]) -> _Replica:
        """The session's home, or else where the fewest calls run, and of these where the fewest have been."""
        usable = [replica for replica in self._replicas if replica.alive and replica not in tried]
        if not usable:
            raise self._nobody()
        home = self._homes.get(session_id)
        if home is not None and home.replica in usable:
            self._homes.move_to_end(session_id)
            return home.replica
        replica = min(usable, key=lambda each: (len(each.running), each.calls))
        if session_id:
            self._homes[session_id] = _Home(replica, np.empty(0, np.int32))
            self._homes.move_to_end(session_id)
            if len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)
        return replica

    def _count(self, call: "_Call", replica: _Replica) -> None:
        replica.prompt_tokens += len(call.prompt_ids)
        home = self._homes.get(call.session_id)
        if home is not None and home.replica is replica and len(call.prompt_ids):
            replica.known_tokens += common_prefix(home.seen, call.prompt_ids)
            home.seen = np.concatenate([call.prompt_ids, np.array(call.ids, np.int32)])

    async def _is_alive(self, replica: _Replica) -> bool:
        """Ask a replica that failed what it is; if it does not say, take it out."""
        if await self._ask_info(replica) is not None:
            return True
        self._take_out(replica)
        return False

    def _take_out(self, replica: _Replica) -> None:
        replica.alive = False
        for session_id in [session_id for session_id, home in self._homes.items() if home.replica is replica]:
            del self._homes[session_id]  # what it had cached is gone
        if replica.revival is None or replica.revival.done():
            replica.revival = asyncio.create_task(self._revive(replica))

    async def _revive(self, replica: _Replica) -> None:
        """Look after a dead replica until it answers; then it gets the weights that the others have, and work."""
        pause = FIRST_PAUSE
        while not replica.alive:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            info = await self._ask_info(replica)
            if info is None or (self._model is not None and not _same(info, self._model)):
                continue
            told = None
            try:
                while told != self._told:  # what is said meanwhile is said to the living only
                    told = self._told
                    await _catch_up(replica.engine, told)
            except EngineError:
                continue
            replica.alive = True

    async def _ask_info(self, replica: _Replica) -> EngineInfo | None:
        try:
            async with asyncio.timeout(ALIVE_SECONDS):
                return await replica.engine.info()
        except (EngineError, TimeoutError):
            return None

    async def _anywhere(self, ask: Callable[[Engine], Awaitable[T]]) -> T:
        replica = self._choose("", set())
        try:
            return await ask(replica.engine)
        except EngineRefusal:
            raise
        except EngineError:
            if await self._is_alive(replica):
                raise
            return await self._anywhere(ask)

    async def _everywhere(self, tell: Callable[[WeightControl], Awaitable[None]]) -> None:
        """Tell all living replicas at once, and wait for each; one that is found dead is told when it comes back."""
        living = [replica for replica in self._replicas if replica.alive]
        for fault in await asyncio.gather(*(self._tell(replica, tell) for replica in living), return_exceptions=True):
            if fault is not None:
                raise fault
        if not any(replica.alive for replica in self._replicas):
            raise self._nobody()

    async def _tell(self, replica: _Replica, tell: Callable[[WeightControl], Awaitable[None]]) -> None:
        if not isinstance(replica.engine, WeightControl):
            raise EngineRefusal(f"the engine {replica.name} does not let anybody change its weights")
        try:
            await tell(replica.engine)
        except EngineError:
            if await self._is_alive(replica):
                raise

    def _nobody(self) -> EngineError:
        return EngineError(f"none of the engines {', '.join(each.name for each in self._replicas)} answers: are they running?")


@dataclass
class _Call:
    """A call as it goes."""

    request_id: str
    session_id: str
    prompt_ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    ids: list[int] = field(default_factory=list)
    delivered: bool = False

    def take(self, piece: Generated | Chatted) -> None:
        tokens = piece.tokens if isinstance(piece, Chatted) else piece
        if isinstance(piece, Chatted):
            self.prompt_ids = self.prompt_ids if piece.prompt_ids is None else piece.prompt_ids
            self.delivered |= bool(piece.deltas) or piece.prompt_ids is not None
        self.ids.extend(tokens.ids)
        self.delivered |= bool(tokens.ids or tokens.finish)


async def _catch_up(engine: Engine, told: _Told) -> None:
    """Tell a replica that comes back what the others were told."""
    if told == _Told() or not isinstance(engine, WeightControl):
        return
    await engine.pause(told.paused or "keep")
    if told.weights:
        await engine.reload_weights(told.weights)
    if told.version is not None:
        await engine.update_version(told.version)
        await engine.reset_prefix_cache()
    if told.adapter is not None:
        await _load_adapter(engine, *told.adapter)
    if told.paused is None:
        await engine.resume()


async def _load_adapter(engine: object, path: str, version: int) -> None:
    if not isinstance(engine, AdapterControl):
        raise EngineRefusal("the engine takes no LoRA adapters")
    await engine.load_adapter(path, version)


def _same(left: EngineInfo, right: EngineInfo) -> bool:
    return (left.model, left.max_model_len, left.token_in) == (right.model, right.max_model_len, right.token_in)
