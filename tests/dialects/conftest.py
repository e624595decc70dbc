"""What the tests of dialects share."""

from hypothesis import settings

settings.register_profile("shared-cores", deadline=None)  # an example may have to wait for a core
settings.load_profile("shared-cores")
