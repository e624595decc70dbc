"""New weights into an engine that serves: no call fails, and no token is sampled under weights with another name.

Merged weights: the engine pauses where it is, loads, is told the version, forgets prefixes that old weights computed (W02), and
goes on; a harness that waits meanwhile is held by the gateway's keep-alives (W03). A LoRA adapter alone is loaded beside the
older ones, without a pause: calls in flight end under the one that they began with, and no version sees another's prefixes.
"""

import asyncio
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from polar.engines.protocol import AdapterControl, Engine, WeightControl
from polar.errors import EngineError, UsageError
from polar.training.config import Publish

KEPT = 2  # directories of weights, so that an engine that starts anew can load the last


class Publisher:
    """Publishes a policy's weights to one engine, or to all replicas of one.

    Args:
        folder: where weights are written, a directory a version; the engine has to see it under the same path.
        publish: what is written, and how the engine takes it.
    """

    def __init__(self, engine: Engine, folder: Path, publish: Publish = "merged") -> None:
        if not isinstance(engine, WeightControl):
            raise UsageError(f"the weights of {engine.name} cannot be changed: train with the embedded engine, vLLM or SGLang")
        self._engine: WeightControl = engine
        self._adapters: AdapterControl | None = None
        if publish == "adapter":
            if not isinstance(engine, AdapterControl):
                raise UsageError(f'{engine.name} takes no LoRA adapters: expected vLLM, or publish = "merged" in [rollout]')
            self._adapters = engine
        self._folder = folder.absolute()

    async def publish(self, save: Callable[[Path], None], version: int) -> dict[str, float]:
        """Have `save` write the weights, and the engine sample from them as `version`; seconds that it took.

        Raises:
            EngineError: as `load`.
        """
        began = time.perf_counter()
        directory = self._folder / f"{version:06}"
        await asyncio.to_thread(save, directory)
        saved = time.perf_counter()
        await self.load(directory, version)
        await asyncio.to_thread(self._forget_old)
        return {"seconds/save": saved - began, "seconds/publish": time.perf_counter() - saved}

    async def load(self, directory: Path, version: int) -> None:
        """Have the engine sample from the weights in `directory` as `version`. Who cancels waits until it does.

        Raises:
            EngineError: it could not be paused, and goes on as before; or it did not take the weights, and stays paused, for
                what it has may be half of them.
        """
        loading = asyncio.create_task(self._load(directory, version))
        cancelled = False
        while not loading.done():
            try:
                await asyncio.wait([loading])
            except asyncio.CancelledError:
                cancelled = True
        loading.result()
        if cancelled:
            raise asyncio.CancelledError

    async def _load(self, directory: Path, version: int) -> None:
        if self._adapters is not None:
            await self._adapters.load_adapter(str(directory), version)
            return
        engine = self._engine
        try:
            await engine.pause("keep")
        except EngineError:
            with suppress(EngineError):  # of one that could not be paused either
                await engine.resume()
            raise
        try:
            await engine.reload_weights(str(directory))
            await engine.update_version(version)
            await self._forget_prefixes()
        except EngineError as fault:
            raise EngineError(
                f"the engine did not take the weights of version {version} in {directory}, and stays paused, for it may have "
                f"half of them: {fault}; restart it, and the same command goes on"
            ) from fault
        await engine.resume()

    async def _forget_prefixes(self) -> None:
        """An engine that salts its prefixes with the version never reuses old ones, and may keep them while calls hold them."""
        try:
            await self._engine.reset_prefix_cache()
        except EngineError:
            if not self._engine.salts_prefixes:
                raise

    def _forget_old(self) -> None:
        needed = self._adapters.adapters if self._adapters else ()
        for directory in sorted(path for path in self._folder.iterdir() if path.name.isdigit())[:-KEPT]:
            if str(directory) not in needed:
                shutil.rmtree(directory, ignore_errors=True)
