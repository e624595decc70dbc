"""Which engine is meant by `--engine`, and the client for it."""

from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Struct

from polar.engines.keys import KEY_VARIABLE
from polar.engines.llama_cpp import LlamaCppEngine
from polar.engines.openai_text import OpenAITextEngine
from polar.engines.protocol import Engine
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.errors import UsageError

Kind = Literal["vllm", "sglang", "llama_cpp", "openai"]
KINDS: tuple[Kind, ...] = get_args(Kind)
OWNERS: dict[str, Kind] = {"vllm": "vllm", "polar": "vllm", "sglang": "sglang", "llamacpp": "llama_cpp"}
PROBE_SECONDS = 10.0
EXPECTED = "expected `embedded` or a URL like http://127.0.0.1:8000"


@dataclass(frozen=True)
class Address:
    """Where an engine is.

    Attributes:
        kind: what serves there; None to find out.
        url: without kind and model; for `openai` with the path (`https://host/v1`).
        model: for `openai`, the model to ask for.
    """

    kind: Kind | None
    url: str
    model: str = ""


def address(text: str, key: str = "", option: str = "--engine", key_variable: str = KEY_VARIABLE) -> Address:
    """Read `[KIND+]URL[#MODEL]`.

    Args:
        key: what would be sent with every request, taken from `key_variable`; a URL with a user name excludes it.
        option: what the user gave it with, for the error.

    Raises:
        UsageError: it is no such thing.
    """
    kind: Kind | None = None
    url = text
    for known in KINDS:
        if text.startswith(f"{known}+"):
            kind, url = known, text.removeprefix(f"{known}+")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket that does not close, or a port beyond 65535
        usable = False
    if not usable:
        raise UsageError(f"{option}: {EXPECTED}, got {text!r}")
    if key and parts.username is not None:
        raise UsageError(
            f"{option}: expected a URL without user name and password where {key_variable} is set: one excludes the other"
        )
    if bool(parts.fragment) != (kind == "openai"):
        raise UsageError(
            f"{option}: expected a model behind # in an openai+ URL (openai+https://host/v1#MODEL) and in no other, got {text!r}"
        )
    return Address(kind, parts._replace(fragment="").geturl(), parts.fragment)


async def open_engine(where: Address, key: str, key_variable: str = KEY_VARIABLE) -> Engine:
    """The client for the engine at an address. Made inside a running event loop, which owns its connections.

    Args:
        key_variable: where the key was taken from, for the advice when it is refused.

    Raises:
        UsageError: something answers that is no engine that Polar knows.
    """
    match where.kind or await _found(where.url, key):
        case "vllm":
            return VllmEngine(where.url, key)
        case "sglang":
            return SglangEngine(where.url, key)
        case "llama_cpp":
            return LlamaCppEngine(where.url, key)
        case "openai":
            return OpenAITextEngine(where.url, where.model, key, key_variable=key_variable)


class _Model(Struct):
    owned_by: str = ""


class _Models(Struct):
    data: list[_Model] = []


async def _found(url: str, key: str) -> Kind:
    """Which server answers, by whose it says that its models are.

    Where none answers, or not with a list of models, vLLM's client will say best what is wrong.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=PROBE_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as http,
            http.get(f"{url.rstrip('/')}/v1/models") as response,
        ):
            if response.status != 200:
                return "vllm"
            models = msgspec.json.decode(await response.read(), type=_Models).data
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
        return "vllm"
    owners = {model.owned_by for model in models}
    for owner in owners & OWNERS.keys():
        return OWNERS[owner]
    whose = ", ".join(sorted(owners)) or "nobody"
    raise UsageError(
        f"no engine that Polar knows answers at {url} (its models are owned by {whose}); "
        f"say what it is: {', '.join(f'{kind}+URL' for kind in KINDS)}"
    )
