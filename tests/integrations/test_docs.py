"""The document of the adapters."""

from pathlib import Path

import pytest

from tests.test_docs import code_blocks

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("trainer", "program"), [("trl", "trl_steps.py"), ("verl", "verl_batch.py")])
def test_an_example_is_what_the_heavy_test_runs(trainer: str, program: str) -> None:
    blocks = [text for _, text in code_blocks((ROOT / "docs" / "integrations.md").read_text())]
    (example,) = (text for text in blocks if f"from polar.integrations.{trainer} import" in text)
    run = (ROOT / "tests" / "e2e" / program).read_text().splitlines()
    assert [line for line in example.splitlines() if line and line not in run] == []
