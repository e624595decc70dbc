"""A gateway without sockets, whose client, engine and disk a test moves step by step."""

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, MutableMapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from polar.audit.session import audit_session
from polar.chat import ChatRequest, Usage
from polar.dialects.openai_chat import OpenAIChat
from polar.engines.protocol import Chatted, EngineFinish, EngineInfo, Generated, LogprobsMode, ResolvedSampling
from polar.engines.served import Served
from polar.gateway.app import GatewayApp
from polar.gateway.backend import Backend
from polar.gateway.sessions import Sessions
from polar.specs import Float32Array, HarnessProfile, Int32Array, SamplingSpec, VersionSpan
from polar.store.capture import CaptureReader, CaptureStore
from polar.store.captured import captured
from polar.tokens.records import Call, Node
from polar.tokens.rendering import Renderer
from polar.tokens.tree import TokenTree
from polar.trajectory.builders import Captured, build

INFO = EngineInfo("policy", "", 32_768, chats=True)


@dataclass
class Generation:
    """One generation; the test says what is sampled and when."""

    request_id: str
    prompt_ids: list[int]
    stop_id: int
    steps: "asyncio.Queue[Sequence[int] | EngineFinish | Exception | None]" = field(default_factory=asyncio.Queue)
    aborted: bool = False
    closed: bool = False

    def say(self, ids: Sequence[int]) -> None:
        self.steps.put_nowait(ids)

    def stop(self, token: int | None = None) -> None:
        """Sample the stop id, or another one that ends a turn."""
        self.say([self.stop_id if token is None else token])
        self.steps.put_nowait("stop")

    def fail(self, error: Exception | None) -> None:
        """Raise, or for None end the stream as if that were all."""
        self.steps.put_nowait(error)


class PuppetEngine:
    """See `polar.engines.protocol.Engine`. A `deaf` one never hears of an abort.

    In chat mode it renders every history whole, by the renderer that token-in has, and tells the ids with the first tokens;
    the ids that end a turn there (`ends`) are no text.

    Attributes:
        asked: the requests that came in chat mode.
        shows: what it tells of the ids that it rendered.
    """

    name = "puppet"
    logprobs_mode: LogprobsMode = "raw"

    def __init__(self, renderer: Renderer) -> None:
        self.generations: list[Generation] = []
        self.deaf = False
        self.asked: list[ChatRequest] = []
        self.shows: Callable[[Int32Array], Int32Array | None] = lambda ids: ids
        self.ends = set(renderer.stop_ids)
        self._renderer = renderer

    async def generate(
        self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Generated, None]:
        generation = Generation(request_id, prompt_ids.tolist(), self._renderer.stop_ids[0])
        self.generations.append(generation)
        count = 0
        try:
            while True:
                step = await generation.steps.get()
                if isinstance(step, Exception):
                    raise step
                if step is None:
                    return
                if isinstance(step, str):
                    yield Generated((), (), step, (VersionSpan(0, count, 1),), Usage(len(prompt_ids), count))
                    return
                count += len(step)
                yield Generated(tuple(step), (-0.5,) * len(step))
        finally:
            generation.closed = True

    async def abort(self, request_id: str) -> None:
        for generation in self.generations:
            if generation.request_id == request_id and not self.deaf:
                generation.aborted = True
                generation.steps.put_nowait("abort")

    async def info(self) -> EngineInfo:
        return INFO

    async def chat(
        self, request_id: str, request: ChatRequest, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Chatted, None]:
        self.asked.append(request)
        ids = self._renderer.render(request.messages, request.tools)
        prompt_ids = self.shows(ids)
        parser = self._renderer.parser(request.tools)
        async with aclosing(self.generate(request_id, ids if prompt_ids is None else prompt_ids, sampling)) as pieces:
            async for piece in pieces:
                deltas, parsed = parser.push([token for token in piece.ids if token not in self.ends]), None
                if piece.finish:
                    held, parsed = parser.finish()
                    deltas += held
                yield Chatted(piece, tuple(deltas), prompt_ids, parsed)
                prompt_ids = None

    async def tokenize(self, text: str) -> Int32Array:
        raise NotImplementedError

    async def score(self, ids: Int32Array) -> Float32Array:
        raise NotImplementedError

    async def close(self) -> None:
        pass

    async def generation(self, number: int) -> Generation:
        """The `number`-th generation, once it has begun."""
        await until(lambda: len(self.generations) > number)
        return self.generations[number]


class PuppetStore(CaptureStore):
    """A real capture file whose commits can be held back, and made to fail.

    Attributes:
        gate: commits wait for it.
        faults: the next commits raise these instead of writing; None lets one through.
        waiting: commits that have begun and not ended.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = asyncio.Event()
        self.gate.set()
        self.faults: list[Exception | None] = []
        self.waiting = 0

    async def commit(self, session_id: str, nodes: Sequence[Node], calls: Sequence[Call], messages: Mapping[str, bytes]) -> None:
        fault = self.faults.pop(0) if self.faults else None
        self.waiting += 1
        try:
            await self.gate.wait()
            if fault is not None:
                raise fault
            await super().commit(session_id, nodes, calls, messages)
        finally:
            self.waiting -= 1


class Client:
    """One HTTP exchange, seen from the client."""

    def __init__(self, app: GatewayApp, key: str, body: bytes | None, pieces: int = 1) -> None:
        self.status = 0
        self.received = b""
        self.complete = False
        self._inbox: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._disconnected = False
        for number in range(pieces if body is not None else 0):
            part = (body or b"")[number::pieces] if pieces == 1 else b""
            self._inbox.put_nowait({"type": "http.request", "body": part, "more_body": number + 1 < pieces})
        scope = {"type": "http", "method": "POST", "path": f"/s/{key}/v1/chat/completions", "headers": []}
        self.task = asyncio.create_task(app(scope, self._inbox.get, self._take))

    async def _take(self, message: MutableMapping[str, Any]) -> None:
        """As uvicorn does: what is sent after a hang-up is dropped without a word."""
        if self._disconnected:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.received += message["body"]
            if not message["more_body"]:
                self.complete = True
                self._inbox.put_nowait({"type": "http.disconnect"})

    def hang_up(self) -> None:
        if not self.complete:
            self._disconnected = True
            self._inbox.put_nowait({"type": "http.disconnect"})

    async def answer(self) -> Any:
        """Body of the reply, as JSON."""
        async with asyncio.timeout(10):
            await self.task
        assert self.complete
        return msgspec.json.decode(self.received)

    async def text(self) -> str:
        """Text of a whole reply."""
        content: str = (await self.answer())["choices"][0]["message"]["content"]
        return content


@dataclass
class Stage:
    """All puppets of one test, and one open session."""

    app: GatewayApp
    sessions: Sessions
    engine: PuppetEngine
    store: PuppetStore
    path: Path
    session_id: str
    key: str

    def ask(self, *, stream: bool = False, content: str = "Hi", history: Sequence[dict[str, Any]] = ()) -> Client:
        messages = [{"role": "user", "content": content}, *history]
        return Client(self.app, self.key, msgspec.json.encode({"messages": messages, "stream": stream}))

    @property
    def runs(self) -> int:
        return len(self.sessions.by_id(self.session_id).runs)

    def stored(self) -> Captured:
        """The session as another process reads it now."""
        with closing(CaptureReader.open(self.path)) as reader:
            return captured(reader, self.session_id)

    async def settled(self) -> Captured:
        """Freeze, and check what must hold of any session however it went."""
        async with asyncio.timeout(10):
            await self.sessions.freeze(self.session_id)
        await self.store.flush()
        assert self.runs == 0
        record = self.stored()
        tree = TokenTree(record.nodes)
        for call in record.calls:
            assert len(tree.path(call.prompt)) == call.prompt_tokens
        told = {generation.request_id: generation for generation in self.engine.generations}
        for call in record.calls:
            if call.call_id in told and call.prompt_tokens:
                assert tree.path(call.prompt).tolist() == told[call.call_id].prompt_ids
        assert audit_session(record, None, None) == []
        for reward in (1.0, None):
            build(record, builder="prefix_merging", status="completed", reward=reward)
        return record


@asynccontextmanager
async def staged(
    renderer: Renderer, path: Path, profile: HarnessProfile = HarnessProfile(), *, chat: bool = False
) -> AsyncIterator[Stage]:
    """Puppets around a real application; it fails when something went wrong that nobody was told."""
    gc.freeze()  # what is there already is not searched below
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
    engine, store = PuppetEngine(renderer), PuppetStore(path)
    policy = Served(engine, INFO, None, decode=renderer.decode) if chat else Served(engine, INFO, renderer)
    sessions = Sessions(store, policy.renderer, INFO.model)
    app = GatewayApp(sessions, Backend(policy, store, path), (OpenAIChat(),))
    opened = await sessions.open(task_id="t", profile=profile, sampling=SamplingSpec())
    try:
        yield Stage(app, sessions, engine, store, path, opened.session_id, opened.key)
    finally:
        await store.close()
    gc.collect()  # an exception that nobody asked for is told when its task goes
    gc.unfreeze()
    assert unseen == []


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)
