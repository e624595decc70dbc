"""Connects engines, has them prove themselves, and finds the renderer of their model."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from polar.engines.keys import KEY_VARIABLE, key_from_environment, shown
from polar.engines.kinds import address, open_engine
from polar.engines.launch import EngineProcess, embedded_engine
from polar.engines.pool import EnginePool, ReplicaStats
from polar.engines.proofs import Proof, SelfTest
from polar.engines.protocol import Engine, EngineInfo
from polar.engines.renderers import load_renderer
from polar.engines.self_test import self_test
from polar.engines.served import Served
from polar.engines.tokenizers import load_tokenizer
from polar.engines.vllm import VllmEngine
from polar.errors import UsageError
from polar.tokens.rendering import Renderer

EMBEDDED = "embedded"
ROUTE_KEY = "POLAR_ROUTE_KEY_"

Note = Callable[[str], None]


@dataclass(frozen=True)
class EngineOptions:
    """Which models answer, and who renders for them.

    Attributes:
        engine: `embedded`, or one or more `[KIND+]URL` of replicas, with commas between.
        model: for the embedded engine, `laptop`, `smollm2` (that is ""), or a model directory; for a URL, the directory of the
            model's tokenizer, "" to use the one that the engine names.
        renderer: `auto`, `none` to have the engine render (chat mode), or a renderer's name.
        routes: requested model name → engine that answers it in the policy's place, and is never trained.
        accept_unproven: serve an engine that cannot prove all that training relies on.
    """

    engine: str = EMBEDDED
    model: str = ""
    renderer: str = "auto"
    routes: Mapping[str, str] = field(default_factory=dict)
    accept_unproven: bool = False


@dataclass(frozen=True)
class Connected:
    """Engines that answer.

    Attributes:
        model_path: directory of the policy's tokenizer; None where nobody says.
        process: the embedded engine's process, None for an engine that somebody else runs.
        tested: what the policy proved, by replica.
    """

    policy: Served
    routes: Mapping[str, Served]
    model_path: Path | None
    process: EngineProcess | None
    tested: Mapping[str, SelfTest]


@dataclass(frozen=True)
class Opened:
    """An engine before anything was asked of it but what it is.

    Attributes:
        replicas: the engines behind `engine`, by URL; itself where there is one.
        model_path: directory of the model's tokenizer; None where nobody says.
    """

    engine: Engine
    replicas: Mapping[str, Engine]
    info: EngineInfo
    model_path: Path | None
    process: EngineProcess | None


@asynccontextmanager
async def connected(options: EngineOptions, *, log: Path, note: Note) -> AsyncIterator[Connected]:
    """Connect the policy and its routes, and have the policy prove itself.

    The embedded engine has a key that only this process knows. The key of an engine by URL is taken from `$POLAR_ENGINE_KEY`,
    that of a route's engine from `$POLAR_ROUTE_KEY_NAME`.

    Args:
        log: file for the embedded engine's output.
        note: gets a line about what takes a while, and about what was found.

    Raises:
        UsageError: not an engine, no renderer can be found for its model, it fails its self-test, …
        EngineError: it does not start, does not answer, or refuses the key.
    """
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(engine_at(options.engine, options.model, log=log, note=note))
        renderer = await find_renderer(opened, options, note)
        note(f"engine ready: {opened.info.model}, context {opened.info.max_model_len} tokens")
        tested = await prove(opened, renderer)
        for name, test in tested.items():
            note(f"self-test: {test.line}" if len(tested) == 1 else f"self-test of {name}: {test.line}")
        _judge(tested, options.accept_unproven)
        decode = await asyncio.to_thread(_decoder, opened.model_path) if renderer is None else None
        bos_id = next(iter(tested.values())).bos_id
        policy = Served(opened.engine, opened.info, renderer, decode=decode, bos_id=bos_id)
        routes = {name: await stack.enter_async_context(_route(name, at, note)) for name, at in options.routes.items()}
        yield Connected(policy, routes, opened.model_path, opened.process, tested)


@asynccontextmanager
async def engine_at(engine: str, model: str, *, log: Path, note: Note) -> AsyncIterator[Opened]:
    """The engine alone: `embedded` starts one with `model` and ends it with the block, URLs find one."""
    if engine == EMBEDDED:
        note(f"starting the embedded engine with {model or 'smollm2'} (log: {log})")
        async with embedded_engine(model or "smollm2", log=log) as process:
            client = VllmEngine(process.url, process.key)
            async with _closing(client):
                yield Opened(client, {process.url: client}, await client.info(), process.model_dir, process)
    else:
        async with _found(engine, KEY_VARIABLE, "--engine") as (found, replicas):
            info = await found.info()
            try:
                yield Opened(found, replicas, info, _path(model or info.model_path), None)
            finally:
                if isinstance(found, EnginePool):
                    note(_told(found.stats()))


@asynccontextmanager
async def _found(text: str, key_variable: str, option: str) -> AsyncIterator[tuple[Engine, Mapping[str, Engine]]]:
    """Clients for the engines at `URL[,URL…]`, and all as one."""
    key = key_from_environment(key_variable)
    async with AsyncExitStack() as stack:
        places = [address(part.strip(), key, option, key_variable) for part in text.split(",")]
        if len({shown(place.url) for place in places}) < len(places):
            raise UsageError(f"{option}: a replica is named twice in {shown(text)!r}")
        replicas: dict[str, Engine] = {}
        for place in places:
            client = await open_engine(place, key, key_variable)
            replicas[shown(place.url)] = await stack.enter_async_context(_closing(client))
        if len(replicas) == 1:
            yield next(iter(replicas.values())), replicas
        else:
            yield await stack.enter_async_context(_closing(EnginePool(replicas))), replicas


@asynccontextmanager
async def _closing(engine: Engine) -> AsyncIterator[Engine]:
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def _route(name: str, text: str, note: Note) -> AsyncIterator[Served]:
    """What a route leads to. Nothing of it is trained, so it has nothing to prove."""
    key_variable = ROUTE_KEY + re.sub(r"\W", "_", name.upper())
    async with _found(text, key_variable, f"--route {name}") as (engine, _):
        info = await engine.info()
        renderer = None
        if not info.chats:
            renderer = await asyncio.to_thread(_loaded, _path(info.model_path), "auto", info)
        note(f"requests for {name!r} go to {info.model}, and are never trained")
        yield Served(engine, info, renderer, trains=False)


async def find_renderer(opened: Opened, options: EngineOptions, note: Note) -> Renderer | None:
    """What renders prompts for an engine; None for chat mode.

    Raises:
        UsageError: there is no way to ask it as the options want.
    """
    info = opened.info
    if options.renderer == "none" or not info.token_in:
        if not info.chats:
            raise UsageError(f"--renderer none: {info.model} takes token ids only, so prompts must be rendered here")
        if options.renderer not in ("none", "auto"):
            raise UsageError(f"--renderer {options.renderer}: {info.model} takes messages only, so nothing is rendered here")
        note("the engine renders; histories that drift fork")
        return None
    if options.engine != EMBEDDED:
        _check_named(options.model)
    try:
        return await asyncio.to_thread(_loaded, opened.model_path, options.renderer, info)
    except UsageError as error:
        if options.renderer != "auto" or not info.chats:
            raise
        note(f"no renderer fits ({error}), so the engine renders; histories that drift fork")
        return None


def _check_named(model: str) -> None:
    """A directory that the user names has to be there: chat mode would not be what was meant."""
    if model and not Path(model).is_dir():
        raise UsageError(f"--model: expected the directory of the model's tokenizer; {model!r} is no directory here")


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _loaded(path: Path | None, name: str, info: EngineInfo) -> Renderer:
    if path is None or not path.is_dir():
        where = f"names {info.model_path}, which is no directory here" if info.model_path else "does not say where it is"
        raise UsageError(
            f"the tokenizer of {info.model!r} is needed, and the engine {where}: name the model's directory with --model, "
            "or for a --route ask the chat API of its server (openai+URL/v1#MODEL)"
        )
    return load_renderer(path, name)


def _decoder(path: Path | None) -> Callable[[Sequence[int]], str] | None:
    """What spells out ids in chat mode, where the model's tokenizer is at hand."""
    try:
        return load_tokenizer(path).decode if path else None
    except UsageError:
        return None


async def prove(opened: Opened, renderer: Renderer | None) -> dict[str, SelfTest]:
    """The self-test of each replica, by name.

    Raises:
        EngineError: one does not answer.
    """
    tests = await asyncio.gather(*(self_test(engine, opened.info, renderer) for engine in opened.replicas.values()))
    return dict(zip(opened.replicas, tests, strict=True))


def _judge(tested: Mapping[str, SelfTest], accept_unproven: bool) -> None:
    """Refuse what failed, and what did not prove all that training relies on unless that is accepted."""
    for name, test in tested.items():
        for proof in test.of("failed"):
            raise UsageError(f"the engine at {name} fails its self-test: {_broken(proof)}")
        for proof in () if accept_unproven else test.doubts:
            raise UsageError(
                f"the engine at {name} leaves unproven what training relies on: {_broken(proof)}, "
                "or take it as it is with --accept-unproven"
            )
    if len({test.logprobs_mode for test in tested.values()}) > 1:
        raise UsageError("--engine: replicas must give log-probabilities of one kind; some are raw and some are processed")


def _broken(proof: Proof) -> str:
    return f"{proof.code}, {proof.says}: {proof.detail}. What to do: {proof.advice}"


def _told(stats: tuple[ReplicaStats, ...]) -> str:
    """`replicas: http://… 12 calls, 83 % of prompt tokens seen before; …`."""
    told = [
        f"{each.name} {each.calls} calls, {each.hit_rate:.0%} of prompt tokens seen before"
        + (f", {each.moved} moved" if each.moved else "")
        + ("" if each.alive else ", dead")
        for each in stats
    ]
    return f"replicas: {'; '.join(told)}"
