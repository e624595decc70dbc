"""The LoRA adapters of a vLLM server: each version has a name and a directory of its own.

A call keeps the adapter that it began with, so all its tokens are of one version (W01). vLLM hashes prefixes with the name and
the directory of an adapter, so a version never uses what another computed (W02). Loading in place under one name would not do: of
two calls that began before and after, each reads its own directory into the one place, and both sample from either.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import token_hex

import msgspec

from polar.engines.http import RouteMissing, Server
from polar.errors import EngineError, UsageError
from polar.specs import VersionSpan

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADVICE = "start vLLM with --enable-lora, --max-lora-rank R and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 for adapters"


@dataclass(eq=False)
class Adapter:
    """An adapter that the server has.

    Attributes:
        name: what requests name as their model; no other was ever called so.
        calls: that run with it.
    """

    name: str
    path: str
    version: int
    calls: int = 0

    def spans(self, sampled: int) -> tuple[VersionSpan, ...]:
        """The one span over `sampled` tokens."""
        return (VersionSpan(0, sampled, self.version),) if sampled else ()


class Adapters:
    """The adapters that were loaded into a server, the newest last."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loaded: list[Adapter] = []

    @property
    def paths(self) -> tuple[str, ...]:
        """Their directories, which the server may read again: it keeps no more adapters in memory than it was told to."""
        return tuple(adapter.path for adapter in self._loaded)

    @property
    def newest(self) -> str | None:
        """Name of the one that calls begin with; None for the model without any."""
        return self._loaded[-1].name if self._loaded else None

    @contextmanager
    def call(self) -> Iterator[Adapter | None]:
        """The newest adapter, kept for as long as a call runs."""
        adapter = self._loaded[-1] if self._loaded else None
        if adapter is None:
            yield None
            return
        adapter.calls += 1
        try:
            yield adapter
        finally:
            adapter.calls -= 1

    async def load(self, path: str, version: int) -> None:
        """Have calls begin with the adapter in `path` from now on; older ones that no call needs are unloaded.

        Raises:
            UsageError: the server takes no adapters.
            EngineError: it did not take this one.
        """
        adapter = Adapter(f"polar-{version}-{token_hex(4)}", path, version)
        try:
            await self._post(LOAD, lora_name=adapter.name, lora_path=path)
        except RouteMissing as error:
            raise UsageError(f"{error}. Expected an engine that takes LoRA adapters: {ADVICE}") from None
        except EngineError as error:
            raise EngineError(f"{error}. If it was not started for such adapters: {ADVICE}") from None
        idle = [each for each in self._loaded if not each.calls]
        self._loaded = [each for each in self._loaded if each.calls] + [adapter]
        for each in idle:
            try:
                await self._post(UNLOAD, lora_name=each.name)
            except RouteMissing:
                pass  # a server that was started anew has forgotten it

    async def _post(self, route: str, **body: str) -> None:
        await self._server.post(route, msgspec.json.encode(body))
