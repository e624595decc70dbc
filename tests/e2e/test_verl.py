"""The real verl: a batch of stored sessions goes through its advantages and its loss, and the numbers are ours."""

import os
import subprocess
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from polar.integrations.sampler import sampler
from polar.rollout.runner import RunOptions
from polar.specs import Trace
from polar.store.capture import CaptureReader
from polar.store.captured import trained_forest
from polar.training.config import Advantage, Aggregation, AlgorithmSpec
from polar.training.groups import Group, Sample, make_batch
from polar.training.loss import TokenTerms, policy_loss
from polar.training.packing import tokens
from polar.trajectory.export import Exported
from tests.integrations.letters import letters
from tests.training.models import tiny_dir

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]  # the first one starts an engine, and a library that is slow to load
GROUP = 4
MODES: dict[Aggregation, str] = {"session": "seq-mean-token-mean", "token": "token-mean"}


class Both(NamedTuple):
    """A run, as verl got it and as our trainer does."""

    verl: dict[str, Tensor]
    uids: list[str]
    rows: list[Exported]
    groups: list[Group]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    python = os.environ.get("POLAR_VERL_PYTHON")
    assert python, "POLAR_VERL_PYTHON names no Python with verl; `make test-all` installs one"
    folder = tmp_path_factory.mktemp("verl")
    tasks = [letters("say", "say something", max_tokens=24), letters("more", "say more, and much of it", max_tokens=24)]
    options = RunOptions(folder / "run", "embedded", str(tiny_dir(folder / "model")), sandbox="process", concurrency=4)
    with sampler(tasks, options) as sessions:
        sampled = sessions.sample([task.id for task in tasks for _ in range(GROUP)])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [python, "tests/e2e/verl_batch.py", str(folder / "run"), str(GROUP), str(folder / "batch")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with safe_open(folder / "batch", "pt") as file:
        metadata, found = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    known = {each.result.session_id: each for each in sampled}
    with closing(CaptureReader.open(folder / "run" / "capture.db")) as reader:
        groups = [
            Group(
                task.id,
                0,
                tuple(
                    Sample(each.result, trained_forest(reader, each.result)) for each in sampled if each.result.task_id == task.id
                ),
            )
            for task in tasks
        ]
    return Both(found, metadata["uid"].split(","), [known[name] for name in metadata["session_id"].split(",")], groups)


def trace(session: Exported) -> Trace:
    (only,) = session.trajectory.traces
    return only


def test_a_row_is_what_is_stored_and_the_rest_is_padding(both: Both) -> None:
    batch = both.verl
    assert len(both.rows) == 2 * GROUP
    assert {uid.partition("/")[0] for uid in both.uids} == {"say", "more"}
    assert [uid.partition("/")[0] for uid in both.uids] == [each.result.task_id for each in both.rows]
    for row, session in enumerate(both.rows):
        one = trace(session)
        prompt, length = len(one.prompt_ids), len(one.response_ids)
        sequence = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row][sequence].tolist() == [*one.prompt_ids, *one.response_ids]
        assert batch["position_ids"][row][sequence].tolist() == list(range(prompt + length))
        assert batch["prompts"][row, -prompt:].tolist() == one.prompt_ids.tolist()
        assert batch["responses"][row, :length].tolist() == one.response_ids.tolist()
        assert batch["response_mask"][row].tolist() == [*one.loss_mask, *[0] * (96 - length)]
        assert batch["rollout_log_probs"][row].tolist() == [*one.response_logprobs, *[0] * (96 - length)]
        assert batch["rm_scores"][row].nonzero().flatten().tolist() == ([length - 1] if one.reward else [])
        assert float(batch["rm_scores"][row].sum()) == one.reward


@pytest.mark.parametrize("kind", ["mean_std", "mean", "leave_one_out"])
def test_verl_computes_our_advantages(both: Both, kind: Advantage) -> None:
    batch = make_batch(both.groups, AlgorithmSpec(advantage=kind, keep_uniform=True), 0)
    assert batch is not None
    ours = dict(zip(batch.forest.session_ids, batch.advantages, strict=True))
    scale = np.sqrt((GROUP - 1) / GROUP) if kind == "mean_std" else 1.0  # verl takes the deviation of a sample, not of the group
    wanted = np.asarray([ours[each.result.session_id] * scale for each in both.rows])
    assert np.abs(wanted).max() > 0.1
    mask = both.verl["response_mask"].numpy()
    np.testing.assert_allclose(both.verl[f"advantages.{kind}"].numpy(), wanted[:, None] * mask, atol=1e-4)


@pytest.mark.parametrize("aggregation", ["session", "token"])
def test_verl_computes_our_loss_and_its_gradient(both: Both, aggregation: Aggregation) -> None:
    spec = AlgorithmSpec(advantage="mean", aggregation=aggregation, keep_uniform=True)
    batch = make_batch(both.groups, spec, 0)
    assert batch is not None
    known = tokens(batch, aggregation)
    forest = batch.forest
    owners = np.repeat(forest.sessions, np.diff(forest.bounds))[forest.loss_mask.astype(bool)]
    old, new = np.zeros_like(known.logprobs), np.zeros_like(known.logprobs)
    masks = both.verl["response_mask"].bool()
    mine = [owners == forest.session_ids.index(each.result.session_id) for each in both.rows]
    for row, place in enumerate(mine):
        old[place], new[place] = (both.verl[name][row][masks[row]].numpy() for name in ("old", "new"))
    logprobs = torch.from_numpy(new).requires_grad_()
    terms = TokenTerms(*map(torch.from_numpy, (old, known.logprobs, known.advantages, known.weights)))
    loss, metrics = policy_loss(logprobs, terms, spec)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert metrics["clip_share"] > 0.05
    assert metrics["importance_capped"] > 0.05
    mode = MODES[aggregation]
    assert float(both.verl[f"loss.{mode}"]) == pytest.approx(float(loss.detach()), abs=1e-6)
    for row, place in enumerate(mine):
        theirs = both.verl[f"gradient.{mode}"][row][masks[row]]
        torch.testing.assert_close(theirs, gradient[torch.from_numpy(place)], rtol=1e-4, atol=1e-7)
