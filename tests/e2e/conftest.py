"""What is asserted in the rig is told as in a test."""

import pytest

pytest.register_assert_rewrite("tests.e2e.harnesses.rig")
