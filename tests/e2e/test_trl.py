"""The real TRL: what its loss gets is what is stored, and it computes what the engine computed."""

import json
import os
import subprocess
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.rollout.folder import RunFolder
from polar.store.capture import CaptureReader
from polar.store.captured import trajectory
from polar.store.ledger import LedgerReader
from tests.training.models import tiny_dir

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]  # the first one starts an engine, and a library that is slow to load
STEPS, TASKS, GROUP = 2, 2, 4


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `trl_steps` left."""
    python = os.environ.get("POLAR_TRL_PYTHON")
    assert python, "POLAR_TRL_PYTHON names no Python with TRL; `make test-all` installs one"
    folder = tmp_path_factory.mktemp("trl")
    command = [python, "-m", "tests.e2e.trl_steps", str(tiny_dir(folder / "model")), str(folder)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def seen(out: Path) -> list[dict[str, Any]]:
    """The rows that TRL's loss got."""
    return [json.loads(line) for line in (out / "seen.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def stored(out: Path) -> list[dict[str, Any]]:
    """The same of the store, with the advantage that TRL is to compute of each."""
    folder, found = RunFolder(out / "run"), []
    groups: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    with closing(LedgerReader.open(folder.ledger)) as ledger, closing(CaptureReader.open(folder.capture)) as reader:
        for session in ledger.sessions():
            assert session.result is not None
            (trace,) = trajectory(reader, session.result, "prefix_merging").traces
            (version,) = {span.policy_version for span in trace.policy_versions}
            row = {
                "prompt_ids": trace.prompt_ids.tolist(),
                "completion_ids": trace.response_ids.tolist(),
                "mask": trace.loss_mask.tolist(),
                "logprobs": trace.response_logprobs.tolist(),
                "advantage": trace.reward,
                "step": version,
            }
            groups[session.task_id, session.sample // GROUP].append(row)
    for group in groups.values():
        rewards = np.asarray([row["advantage"] for row in group])
        for row, worth in zip(group, (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4), strict=True):
            found.append(row | {"advantage": worth})
    return found


def test_the_loss_gets_the_stored_tokens_and_no_others(seen: list[dict[str, Any]], stored: list[dict[str, Any]]) -> None:
    assert len(seen) == STEPS * TASKS * GROUP
    exact = ("prompt_ids", "completion_ids", "mask", "logprobs", "step")
    assert Counter(str([row[name] for name in exact]) for row in seen) == Counter(
        str([row[name] for name in exact]) for row in stored
    )
    assert any(0 in row["mask"] for row in seen), "there is context between sampled turns"


def test_a_group_is_what_trl_takes_for_one(seen: list[dict[str, Any]], stored: list[dict[str, Any]]) -> None:
    known = {str(row["completion_ids"]): row["advantage"] for row in stored}
    np.testing.assert_allclose([row["advantage"] for row in seen], [known[str(row["completion_ids"])] for row in seen], atol=1e-4)
    assert any(row["advantage"] for row in seen)


def test_trl_computes_what_the_engine_did_also_after_an_update(out: Path) -> None:
    steps = [line for line in json.loads((out / "logs.json").read_text()) if "loss" in line]
    assert len(steps) == STEPS
    assert all(line["grad_norm"] > 0 for line in steps)
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-4 for line in steps)
    assert all(line["polar/tokens_left_out"] == 0 == line["polar/rows_without_reward"] for line in steps)
