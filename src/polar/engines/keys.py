"""The key to the routes of an engine that Polar runs.

An agent in a sandbox shares the host's loopback: without a key it could change weights, or sample what nobody captures.
The key travels in the environment, never on a command line, which every process of the machine may read.
"""

import hmac
import os
import re

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from polar.errors import UsageError

KEY_VARIABLE = "POLAR_ENGINE_KEY"
OPEN_PATH = "/health"
CREDENTIALS = re.compile(r"(?<=://)[^/?#]*@")


def key_from_environment(variable: str = KEY_VARIABLE) -> str:
    """The engine's key as `variable` of the environment gives it; empty for an engine without one.

    Raises:
        UsageError: it cannot be sent in a header.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"{variable}: expected one line of printable ASCII characters")
    return key


def shown(addresses: str) -> str:
    """URLs as they may be stored and told: without user names and passwords."""
    return CREDENTIALS.sub("", addresses)


def guards(key: str) -> list[Middleware]:
    """What an application puts before its routes to have them ask for `key`; nothing for an empty one."""
    return [Middleware(KeyGuard, key=key)] if key else []


class KeyGuard:
    """Refuses every request without `Authorization: Bearer KEY` with 401, in vLLM's error shape. `/health` stays open."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] == OPEN_PATH or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            error = {"message": "the engine's key is missing or wrong", "type": "Unauthorized", "param": None, "code": 401}
            await JSONResponse({"error": error}, 401)(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.encode(), self._key)
