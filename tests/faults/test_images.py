"""T11: how often an engine expands an image's placeholder cannot be checked here, so such calls are never trained."""

from collections.abc import AsyncGenerator

import pytest
from msgspec import structs

from polar.audit.session import prove_session
from polar.chat import ChatRequest, TextPart
from polar.engines.protocol import Chatted, ResolvedSampling
from polar.engines.scripted import Scripted
from polar.engines.vllm import VllmEngine
from polar.trajectory.builders import build
from tests.gateway.conftest import Serve
from tests.gateway.conversation import Conversation

PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

chat = VllmEngine.chat


def seeing(
    self: VllmEngine, request_id: str, request: ChatRequest, sampling: ResolvedSampling, *, session_id: str = ""
) -> AsyncGenerator[Chatted, None]:
    """The scripted engine has no eyes: it is told that there was an image."""
    messages = tuple(
        structs.replace(message, content=tuple(part if isinstance(part, TextPart) else TextPart("□") for part in message.content))
        for message in request.messages
    )
    return chat(self, request_id, structs.replace(request, messages=messages), sampling, session_id=session_id)


async def test_a_call_whose_images_the_engine_rendered_is_unproven(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmEngine, "chat", seeing)
    async with serve(lambda call: Scripted("A dot."), chat=True) as stand:
        session_id, key = await stand.open()
        talk = Conversation(stand.client(key), [{"role": "user", "content": "Hi."}], tools=None)
        await talk.ask()
        content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
        talk.messages.append({"role": "user", "content": content})
        await talk.ask()
        captured = await stand.captured(session_id)
    assert [call.untrained for call in captured.calls] == ["", "unproven"]
    accounting = build(captured, builder="prefix_merging", status="completed", reward=1.0).accounting
    assert accounting.excluded == {"unproven": captured.calls[1].sampled}
    assert accounting.trained == captured.calls[0].sampled
    assert prove_session(captured, None, None).findings == []
