"""What OpenAI's APIs share: error objects, model lists, images, and server-sent events.

Events are ASCII-escaped JSON: some clients break lines at U+2028.
"""

import re
from collections.abc import Sequence

import msgspec

from polar.chat import ImagePart, TokenLogprob
from polar.dialects.ascii import encode
from polar.dialects.bodies import shortened
from polar.dialects.protocol import Fault, FaultKind, ModelCard, Route
from polar.errors import InvalidRequest

_IMAGE_TYPE = re.compile(r"image/[a-z0-9.+-]+", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}")

_STATUS: dict[FaultKind, int] = {
    "invalid": 400,
    "context_length": 400,
    "unauthorized": 401,
    "not_found": 404,
    "frozen": 409,
    "unavailable": 503,
    "internal": 500,
}


def status(fault: Fault) -> int:
    """HTTP status of a fault."""
    return _STATUS[fault.kind]


def error_body(fault: Fault) -> dict[str, object]:
    """`{"error": {…}}`. What clients compact on is the code `context_length_exceeded`, or OpenAI's sentence."""
    kind = "invalid_request_error" if status(fault) < 500 else "server_error"
    code = "context_length_exceeded" if fault.kind == "context_length" else fault.code
    return {"error": {"message": _message(fault), "type": kind, "param": None, "code": code}}


def models_body(route: Route, cards: Sequence[ModelCard]) -> bytes:
    """The list of models, or the one that the path named."""
    data = [
        {"id": card.id, "object": "model", "created": card.created, "owned_by": "polar", "max_model_len": card.max_model_len}
        for card in cards
    ]
    return msgspec.json.encode(data[0] if route.model else {"object": "list", "data": data})


def sse(event: str | None, body: dict[str, object]) -> bytes:
    """One server-sent event, with an `event:` line if it is named."""
    name = f"event: {event}\n".encode() if event else b""
    return b"".join((name, b"data: ", encode(body), b"\n\n"))


def _message(fault: Fault) -> str:
    if fault.kind != "context_length" or not fault.max_model_len:
        return fault.message
    return (
        f"This model's maximum context length is {fault.max_model_len} tokens. However, your messages resulted in "
        f"{fault.prompt_tokens} tokens. Please reduce the length of the messages."
    )


def image_part(place: str, url: str) -> ImagePart:
    """An image given by `url`: a data URL is taken apart. `place` is its path in the body, for the error.

    Raises:
        InvalidRequest: no URL, or a data URL that holds no image in base64.
    """
    if url[:5].lower() != "data:":
        if not url:
            raise InvalidRequest(f"{place}: expected the URL of an image, got an empty text")
        return ImagePart(url=url)
    head, _, data = url[5:].partition(",")
    media_type, *options = head.split(";")
    if not _IMAGE_TYPE.fullmatch(media_type) or "base64" not in options or not _BASE64.fullmatch(data):
        raise InvalidRequest(f"{place}: expected data:image/…;base64,…, got {shortened(url)}")
    return ImagePart(media_type=media_type, data=data)


def token_bytes(token: TokenLogprob) -> list[int] | None:
    """A token's bytes; None where it is a part of a character, which its text does not show."""
    return None if "\ufffd" in token.token else list(token.token.encode())
