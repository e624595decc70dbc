"""What clients of Gemini do with contents: write a history, and keep a reply for the next one; and how the dialect reads them."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from polar.chat import ChatRequest, Choice, FinishReason, ImagePart, Message, Part, Reply, Usage
from polar.dialects.gemini import Gemini
from polar.dialects.protocol import Target
from polar.ids import signature

DIALECT = Gemini()
CALL = "c0aaaaaaaa"
OURS = signature(CALL, 0)
HELLO = {"role": "user", "parts": [{"text": "x"}]}
THOUGHTS = {"thinkingConfig": {"includeThoughts": True}}
Spelling = Callable[[str], str]


def as_sent(name: str) -> str:
    return name


def snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda found: f"_{found[0].lower()}", name)


def written(messages: Sequence[Message], spell: Spelling = as_sent, *, ids: bool = True) -> dict[str, Any]:
    """The body of a request with this history. Responses that follow each other share one content, as in all clients."""
    body: dict[str, Any] = {"contents": []}
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    for message in messages:
        parts = [part for one in _parts(message, names, ids) for part in [{spell(k): v for k, v in one.items()}]]
        previous = body["contents"][-1:]
        if message.role == "system":
            body[spell("systemInstruction")] = {"parts": parts}
        elif message.role == "tool" and previous and "functionResponse" in str(previous[0]["parts"][-1:]):
            previous[0]["parts"] += parts
        else:
            body["contents"].append({"role": "model" if message.role == "assistant" else "user", "parts": parts})
    return body


def _parts(message: Message, names: dict[str, str], ids: bool) -> list[dict[str, Any]]:
    if message.role == "tool":
        response = {"name": names[message.tool_call_id], "response": {"error" if message.is_error else "output": message.text}}
        return [{"functionResponse": {**response, **({"id": message.tool_call_id} if ids else {})}}]
    parts: list[dict[str, Any]] = [{"text": message.reasoning, "thought": True}] if message.reasoning else []
    parts += [_part(part) for part in message.content]
    for call in message.tool_calls:
        args = {"name": call.name, "args": json.loads(call.arguments)}
        parts.append({"functionCall": {**args, **({"id": call.id} if ids else {})}})
    return parts


def _part(part: Part) -> dict[str, Any]:
    if not isinstance(part, ImagePart):
        return {"text": part.text}
    if part.url:
        return {"fileData": {"mimeType": part.media_type, "fileUri": part.url}}
    return {"inlineData": {"mimeType": part.media_type, "data": part.data}}


def stream_of(data: bytes, sse: bool) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    if not sse:
        chunks: list[dict[str, Any]] = json.loads(data)
        return chunks
    lines = [line for line in data.splitlines() if line]
    assert all(line.isascii() and line.startswith(b"data: ") for line in lines)
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def kept_by_gemini_cli(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The content that Gemini CLI keeps: thoughts dropped, texts merged into the first, ids prefixed."""
    parts: list[dict[str, Any]] = []
    for part in (part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]):
        if part.get("thought") or (part.get("text") == "" and "thoughtSignature" not in part):
            continue
        if "functionCall" in part:
            call = part["functionCall"]
            part = {**part, "functionCall": {**call, "id": f"{call['name']}__{call['id']}"}}
        if parts and parts[-1].get("text") and "text" in part:
            parts[-1]["text"] += part["text"]
        else:
            parts.append(dict(part))
    return {"role": "model", "parts": parts}


def kept_by_pi(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The content that Pi keeps: neighbours of one sort merged with the last signature; calls without ids."""
    parts: list[dict[str, Any]] = []
    for part in (part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]):
        if "functionCall" in part:
            parts.append({**part, "functionCall": {k: v for k, v in part["functionCall"].items() if k != "id"}})
        elif parts and "text" in parts[-1] and parts[-1].get("thought") == part.get("thought"):
            parts[-1] = {**parts[-1], **part, "text": parts[-1]["text"] + part["text"]}
        else:
            parts.append(dict(part))
    return {"role": "model", "parts": [part for part in parts if part.get("text", "x").strip() or "thoughtSignature" in part]}


def parse(body: object, verb: str = "generateContent", query: str = "") -> ChatRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return DIALECT.parse(Target("POST", f"/v1beta/models/policy:{verb}", query), data)


def parse_config(**generation: Any) -> ChatRequest:
    return parse({"contents": [HELLO], "generationConfig": generation})


def messages_of(*contents: dict[str, Any]) -> tuple[Message, ...]:
    return parse({"contents": list(contents)}).messages


def model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def call(name: str, args: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args or {}, **fields}}


def response(name: str, response: object, **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response, **fields}}


def reply_to(message: Message, finish: FinishReason = "stop") -> Reply:
    return Reply(CALL, "policy", 17, (Choice(message, finish),), Usage(3, 5))
