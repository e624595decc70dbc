"""What TRL gets of a session. TRL itself is in tests/e2e/test_trl.py."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polar.errors import CaptureError, UsageError
from polar.integrations.sampler import Sampler
from polar.integrations.trl import Rollouts, rows, session_reward
from polar.trajectory.export import Exported

END = 258


def test_a_row_has_the_ids_of_its_trace_and_its_mask(sessions: dict[str, Exported]) -> None:
    (trace,) = sessions["chain"].trajectory.traces
    made = rows([sessions["chain"]], "refuse", 1.0, END)
    assert made["prompt_ids"] == [trace.prompt_ids.tolist()]
    assert made["completion_ids"] == [trace.response_ids.tolist()]
    assert made["logprobs"] == [trace.response_logprobs.tolist()]
    assert made["env_mask"] == [trace.loss_mask.tolist()]
    assert 0 < sum(made["env_mask"][0]) < len(made["env_mask"][0]), "there is context between the turns"
    assert made["reward"] == [sessions["chain"].result.reward]
    assert made["tokens_left_out"] == [0]


def test_several_traces_are_refused_unless_a_rule_is_named(sessions: dict[str, Exported]) -> None:
    with pytest.raises(UsageError, match=r'has 2 traces \(agent, agent\).*several="longest"'):
        rows([sessions["split"]], "refuse", 1.0, END)
    short, long = sorted(sessions["split"].trajectory.traces, key=lambda trace: int(trace.loss_mask.sum()))
    assert len(short.response_ids) < len(long.response_ids)
    made = rows([sessions["split"]], "longest", 1.0, END)
    assert made["completion_ids"] == [long.response_ids.tolist()]
    assert made["tokens_left_out"] == [int(short.loss_mask.sum())]


def test_a_session_without_a_reward_is_a_row_in_which_nothing_is_trained(sessions: dict[str, Exported]) -> None:
    made = rows([sessions["silent"]], "refuse", 1.0, END)
    assert (made["completion_ids"], made["env_mask"], made["reward"]) == ([[END]], [[0]], [None])


def test_what_trl_cannot_compute_again_is_refused(sessions: dict[str, Exported]) -> None:
    with pytest.raises(CaptureError, match=r"L01.*at temperature 1, and TRL .* of 0\.7: set `temperature`"):
        rows([sessions["chain"]], "refuse", 0.7, END)
    (trace,) = sessions["chain"].trajectory.traces
    cut = replace(sessions["chain"].trajectory, traces=(replace(trace, top_p=0.9),))
    with pytest.raises(CaptureError, match="L01.*top_p 0.9"):
        rows([replace(sessions["chain"], trajectory=cut)], "refuse", 1.0, END)


def test_rewards_are_given_as_they_are_and_what_is_left_out_is_logged() -> None:
    logged: dict[str, float] = {}
    columns: dict[str, list[str]] = {}
    given = session_reward([1.0, None], ["a", "b"], [3, 4], logged.__setitem__, columns.__setitem__, prompts=["x", "y"])
    assert given == [1.0, None]
    assert logged == {"polar/rows_without_reward": 1, "polar/tokens_left_out": 7}
    assert columns == {"session_id": ["a", "b"]}


@pytest.mark.parametrize(
    ("changes", "prompts", "why"),
    [
        ({"tools": [print]}, ["chain"], "has `tools`"),
        ({"accelerator": SimpleNamespace(num_processes=2)}, ["chain"], "expected one training process, got 2"),
        ({}, [[{"role": "user", "content": "say"}]], "expected the id of a task"),
        (
            {"accelerator": SimpleNamespace(num_processes=1, unwrap_model=lambda model: SimpleNamespace(peft_config={}))},
            ["chain"],
            "trains an adapter",
        ),
    ],
)
def test_a_trainer_that_is_set_up_for_something_else_is_told(changes: dict[str, Any], prompts: list[Any], why: str) -> None:
    alone = SimpleNamespace(num_processes=1, unwrap_model=lambda model: model)
    settings = {"tools": None, "accelerator": alone, "model": None, "state": SimpleNamespace(global_step=0), **changes}
    with pytest.raises(UsageError, match=why):
        Rollouts(cast(Sampler, None))(prompts, cast(Any, SimpleNamespace(**settings)))
