"""A real gateway before a scripted policy, as for the gateway's own tests."""

from tests.gateway.conftest import policy_renderer, policy_tokenizer, serve

__all__ = ["policy_renderer", "policy_tokenizer", "serve"]
