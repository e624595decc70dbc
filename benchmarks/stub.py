"""An inference server that costs next to nothing: it knows one answer of 200 tokens, written out in advance.

`POST /inference/v1/generate` answers as vLLM's token route does, `POST /v1/chat/completions` as vLLM does when it is asked for
token ids and log-probabilities, and `GET /weight_info` names the version. A streamed answer has one event per token. A chat whose
history holds our answer is rendered as its first prompt, that answer and a little more. `POST /pace?hold=SECONDS&step=SECONDS`
sets how long every answer is held back, and how long a token of a stream takes (0: all at once).
"""

import argparse
import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

TOKENS = 200
MAX_MODEL_LEN = 1_000_000
CHAT_PROMPTS = {0: 250, 20_000: 25_000, 300_000: 120_000}  # bytes of a chat request, from there: prompt ids of its answer
REPLY_IDS = [*(504 + number % 40 for number in range(TOKENS - 1)), 2]
FOLLOW_UP_IDS = 20
TEXT = "The build is green; next I read the failing test and its fixture. "

_TEXT_START = TEXT[:40].encode()
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_PACE = re.compile(rb"/pace\?hold=([\d.]+)&step=([\d.]+)")
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_WEIGHTS = b'{"weight_version":"default"}'


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _events(*values: object) -> list[bytes]:
    return [b"data: " + _compact(value) + b"\n\n" for value in values]


# --- the token route --------------------------------------------------------------------------------------------------


def _generated() -> list[bytes]:
    """All events of the token route but the usage."""
    events: list[object] = []
    for place, token in enumerate(REPLY_IDS):
        last = place == TOKENS - 1
        entry = {"token_id": token, "logprob": -0.5123456716537476, "rank": 1, "top_logprobs": []}
        versions = [{"version": "default", "start": 0, "end": TOKENS}] if last else None
        choice = {"index": 0, "finish_reason": "stop" if last else None, "token_ids": [token], "weight_versions": versions}
        events.append({"request_id": "stub", "usage": None, "choices": [{**choice, "logprobs": {"content": [entry]}}]})
    return _events(*events)


def _usage(prompt_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": TOKENS, "total_tokens": prompt_tokens + TOKENS}


_GENERATED = _generated()


def generated(body: bytes) -> list[bytes]:
    """The answer of the token route: it counts the ids that came, and repeats nothing of them."""
    start = body.find(b'"token_ids"')
    prompt_tokens = body.count(b",", start, body.index(b"]", start)) + 1
    usage = {"request_id": "stub", "usage": _usage(prompt_tokens), "choices": []}
    return [*_GENERATED, *_events(usage), b"data: [DONE]\n\n"]


# --- the chat route ---------------------------------------------------------------------------------------------------


def _pieces() -> list[str]:
    """The text of the answer, a piece per token; the last one ends the turn and has none."""
    text = (TEXT * 13)[: 4 * (TOKENS - 1)]
    return [text[start : start + 4] for start in range(0, len(text), 4)] + [""]


def _logprob(piece: str) -> dict[str, object]:
    return {"token": piece, "logprob": -0.5123456716537476, "bytes": list(piece.encode()), "top_logprobs": []}


def prompt_ids(count: int, *, follows: bool) -> list[int]:
    """As many ids, of four and five digits; of a prompt that `follows` our answer, with that and a few more."""
    ids = [1000 + number * 7919 % 30_000 for number in range(count)]
    return [*ids, *REPLY_IDS, *range(700, 700 + FOLLOW_UP_IDS)] if follows else ids


def chat_whole(prompt: list[int]) -> bytes:
    """Body of an answer that is not streamed."""
    prompt_tokens = len(prompt)
    pieces = _pieces()
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "".join(pieces)},
        "logprobs": {"content": [_logprob(piece) for piece in pieces]},
        "finish_reason": "stop",
        "token_ids": REPLY_IDS,
    }
    return _compact(
        {
            **_chat("chat.completion"),
            "choices": [choice],
            "usage": _usage(prompt_tokens),
            "prompt_token_ids": prompt,
        }
    )


def chat_events(prompt: list[int]) -> list[bytes]:
    """Events of a streamed answer."""
    prompt_tokens = len(prompt)
    head = _chat("chat.completion.chunk")
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    events: list[object] = [{**head, "choices": [opening], "prompt_token_ids": prompt}]
    for piece, token in zip(_pieces(), REPLY_IDS, strict=True):
        last = "stop" if token == REPLY_IDS[-1] else None
        choice = {"index": 0, "delta": {"content": piece}, "logprobs": {"content": [_logprob(piece)]}, "finish_reason": last}
        events.append({**head, "choices": [{**choice, "token_ids": [token]}]})
    events.append({**head, "choices": [], "usage": _usage(prompt_tokens)})
    return [*_events(*events), b"data: [DONE]\n\n"]


def _prompts() -> Iterator[tuple[tuple[int, bool], list[int]]]:
    """By the least size of the request, and whether it follows our answer."""
    for size, count in CHAT_PROMPTS.items():
        for follows in (False, True):
            yield (size, follows), prompt_ids(count, follows=follows)


def _chat(sort: str) -> dict[str, object]:
    return {"id": "chatcmpl-stub", "object": sort, "created": 1_796_000_000, "model": "policy"}


# --- the server -------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """What all connections share. Streams advance together, as the sequences of a batch do."""

    model_dir: str
    hold: float = 0.0
    step: float = 0.0
    whole: dict[tuple[int, bool], bytes] = field(default_factory=lambda: {key: chat_whole(ids) for key, ids in _prompts()})
    events: dict[tuple[int, bool], list[bytes]] = field(
        default_factory=lambda: {key: chat_events(ids) for key, ids in _prompts()}
    )
    streams: list["Stream"] = field(default_factory=list)

    def told(self, request: bytes) -> bytes:
        """What a GET route says."""
        return _WEIGHTS if request.startswith(b"GET /weight_info ") else self.models()

    def models(self) -> bytes:
        model = {"id": "policy", "object": "model", "root": self.model_dir, "max_model_len": MAX_MODEL_LEN}
        return _compact({"object": "list", "data": [model]})

    def start(self, stream: "Stream") -> None:
        self.streams.append(stream)
        if len(self.streams) == 1:
            self._next_step()

    def _next_step(self) -> None:
        self.streams = [stream for stream in self.streams if stream.advance()]
        if self.streams:
            asyncio.get_running_loop().call_later(self.step, self._next_step)


@dataclass(eq=False)
class Stream:
    """One streamed answer on its way."""

    transport: asyncio.Transport
    events: list[bytes]
    sent: int = 0

    def advance(self) -> bool:
        """Send the next event; whether there is another."""
        if self.transport.is_closing():
            return False
        head = b"" if self.sent else _STREAM_HEAD
        event = self.events[self.sent]
        self.sent += 1
        done = self.sent == len(self.events)
        self.transport.write(b"%s%x\r\n%s\r\n%s" % (head, len(event), event, _LAST_CHUNK if done else b""))
        return not done


class Exchange(asyncio.Protocol):
    """One connection; requests come one after the other."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._buffer = bytearray()
        self._needed = 0  # bytes of the request that is coming in, once its head is there

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._needed:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            length = _LENGTH.search(self._buffer, 0, end)
            self._needed = end + 4 + (int(length[1]) if length else 0)
        if len(self._buffer) >= self._needed:
            request, self._needed = bytes(self._buffer[: self._needed]), 0
            self._buffer.clear()
            self._take(request)

    def _take(self, request: bytes) -> None:
        if request.startswith(b"GET "):
            self._whole(self._server.told(request))
        elif pace := _PACE.match(request[5:100]):
            self._server.hold, self._server.step = float(pace[1]), float(pace[2])
            self._whole(b"{}")
        elif self._server.hold:
            asyncio.get_running_loop().call_later(self._server.hold, self._answer, request)
        else:
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        if request.startswith(b"POST /inference/v1/generate"):
            self._stream(generated(request))
            return
        key = max(least for least in CHAT_PROMPTS if least <= len(request)), _TEXT_START in request
        if b'"stream":true' in request or b'"stream": true' in request:
            self._stream(self._server.events[key])
        else:
            self._whole(self._server.whole[key])

    def _stream(self, events: list[bytes]) -> None:
        if self._server.step:
            self._server.start(Stream(self._transport, events))
        else:
            self._whole(b"".join(events), b"text/event-stream")

    def _whole(self, body: bytes, content_type: bytes = b"application/json") -> None:
        if not self._transport.is_closing():
            self._transport.write(_HEAD % (content_type, len(body)) + body)


async def serve(model_dir: str) -> None:
    """Listen on a free port, and say which."""
    server = Server(model_dir)
    listener = await asyncio.get_running_loop().create_server(lambda: Exchange(server), "127.0.0.1", 0, backlog=4096)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await listener.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", help="what /v1/models names as the model's directory")
    asyncio.run(serve(parser.parse_args().model_dir))
