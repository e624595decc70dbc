"""What the scripted engine is asked, in the shapes of vLLM's routes; fields that change nothing here are not read."""

from typing import Any, TypeVar
from uuid import uuid4

import msgspec
from msgspec import Struct, field
from starlette.requests import Request
from starlette.responses import Response

T = TypeVar("T")


class Sampling(Struct):
    max_tokens: int = 16
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    routed_experts_prompt_start: int = 0


class Asked(Struct, kw_only=True):
    """What every route that generates is told."""

    stop_token_ids: tuple[int, ...] = ()
    request_id: str = field(default_factory=lambda: uuid4().hex)
    cache_salt: str = ""
    model: str = ""
    stream: bool = False


class Generate(Asked, kw_only=True):
    """Body of `/inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: Sampling


class Complete(Asked, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: list[int]
    max_tokens: int = 16
    prompt_logprobs: int | None = None


class _StreamOptions(Struct):
    include_usage: bool = False


class Chat(Asked, kw_only=True):
    """Body of `/v1/chat/completions`; of `/tokenize` too, which may name a bare prompt instead of messages."""

    messages: list[dict[str, Any]] = []
    prompt: str = ""
    add_special_tokens: bool = True
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: int | None = None
    logprobs: bool = False
    return_token_ids: bool = False
    stream_options: _StreamOptions | None = None


class Refused(Exception):
    """A request is refused with a status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read(request: Request, kind: type[T]) -> T:
    """The body of a request.

    Raises:
        Refused: it is malformed.
    """
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except msgspec.DecodeError as error:
        raise Refused(400, str(error)) from error


def answer(body: dict[str, Any], status: int = 200) -> Response:
    """A body as JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def refusal(request: Request, error: Exception) -> Response:
    """A refusal in vLLM's words."""
    status = error.status if isinstance(error, Refused) else 500
    return answer({"error": {"message": str(error), "type": "BadRequestError", "param": None, "code": status}}, status)
