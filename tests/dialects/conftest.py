"""What the tests of dialects share."""

from hypothesis import settings

from tests.gateway.conftest import policy_renderer, policy_tokenizer, serve

__all__ = ["policy_renderer", "policy_tokenizer", "serve"]

settings.register_profile("shared-cores", deadline=None)  # an example may have to wait for a core
settings.load_profile("shared-cores")
