"""The wire APIs that the gateway speaks."""

from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.protocol import Dialect

DIALECTS: tuple[Dialect, ...] = (OpenAIChat(),)
"""In the order in which they are asked; the last one answers what none of the others claims."""
