"""A harness in miniature: it keeps a history, asks through the real SDK, and answers tool calls."""

from dataclasses import dataclass, field
from typing import Any

import openai

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


def call_text(command: str, before: str = "") -> str:
    """A reply with one tool call, in the model's own spelling: odd spacing, escapes."""
    return f'{before}<tool_call>\n{{"name": "bash", "arguments": {{"command":  "{command}"}}}}\n</tool_call>'


@dataclass
class Conversation:
    """One history. `messages` may be changed by a test as a harness might."""

    client: openai.AsyncOpenAI
    messages: list[dict[str, Any]] = field(default_factory=lambda: [{"role": "user", "content": "Do it."}])
    tools: list[dict[str, Any]] | None = field(default_factory=lambda: list(TOOLS))

    async def ask(self, *, stream: bool = False, **extra: Any) -> dict[str, Any]:
        """One call; the reply joins the history, and each tool call gets a result."""
        message = await (self._streamed(**extra) if stream else self._whole(**extra))
        self.messages.append(message)
        for call in message.get("tool_calls", []):
            self.messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": f"result of {call['id'][:6]} <|im_end|>"}
            )
        return message

    def _request(self, extra: dict[str, Any]) -> dict[str, Any]:
        tools = {"tools": self.tools} if self.tools else {}
        return {"model": "policy", "messages": self.messages, **tools, **extra}

    async def _whole(self, **extra: Any) -> dict[str, Any]:
        reply = await self.client.chat.completions.create(**self._request(extra))
        message: dict[str, Any] = reply.choices[0].message.model_dump(exclude_none=True)
        return message

    async def _streamed(self, **extra: Any) -> dict[str, Any]:
        stream = await self.client.chat.completions.create(**self._request(extra), stream=True)
        text, calls = "", []
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                calls += [call.model_dump(exclude={"index"}) for call in choice.delta.tool_calls or []]
        return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
