"""The wire APIs that the gateway speaks."""

from polar.dialects.anthropic_messages import AnthropicMessages
from polar.dialects.gemini import Gemini
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.openai_responses import OpenAIResponses
from polar.dialects.protocol import Dialect

DIALECTS: tuple[Dialect, ...] = (
    AnthropicMessages(),
    OpenAIResponses(),
    Gemini(),
    OpenAIChat(),
)
"""In the order in which they are asked; the last one answers what none of the others claims."""
