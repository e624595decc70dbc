"""Sessions as TRL's rollouts: `GRPOTrainer(rollout_func=Rollouts(…), reward_funcs=[session_reward])`.

A row's prompt is the id of a task, and each row that TRL asks for becomes a session of it. TRL gets the ids as they were
sampled, the engine's log-probabilities, and the mask of a trace as its `env_mask`: what tools and users said between sampled
turns is context, and not in the loss. TRL takes one sequence a row, so a session with several traces is refused, or one is chosen
by a rule that is asked for by name; a session without reward or trace becomes a row without reward in which nothing is trained.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict

from polar.errors import CaptureError, UsageError
from polar.integrations.sampler import Sampler
from polar.integrations.traces import Several, left_out, one_trace, trained_at
from polar.trajectory.export import Exported


class State(Protocol):
    global_step: int


class Trainer(Protocol):
    """What is asked of TRL's `GRPOTrainer`."""

    state: State
    accelerator: Any
    model: Any
    processing_class: Any
    tools: Any
    temperature: float
    use_vllm: bool
    vllm_generation: Any
    _last_loaded_step: int


class Rows(TypedDict):
    """What TRL takes of a rollout function, a list entry a row; of the last three each goes to reward functions."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    env_mask: list[list[int]]
    reward: list[float | None]
    session_id: list[str]
    tokens_left_out: list[int]


class Rollouts:
    """TRL's rollout function.

    Args:
        several: of a session with several traces, `refuse` the whole batch, or train the `longest`.
    """

    def __init__(self, sampler: Sampler, *, several: Several = "refuse") -> None:
        self._sampler = sampler
        self._several = several
        self._published: int | None = None

    def __call__(self, prompts: Sequence[str], trainer: Trainer) -> Rows:
        """Sessions of the tasks that `prompts` names, under the trainer's weights as they are.

        Raises:
            UsageError: the trainer is set up for what this cannot give.
            CaptureError: L01, the trainer computes log-probabilities of another temperature than the engine's are of.
            InfrastructureError: engine, disk, …; or no session has a reward.
        """
        _check(prompts, trainer)
        step = trainer.state.global_step
        if self._published != step:
            self._sampler.publish(_saving(trainer), step)
            self._published = step
        return rows(self._sampler.sample(prompts), self._several, trainer.temperature, trainer.processing_class.eos_token_id)


def rows(sessions: Sequence[Exported], several: Several, temperature: float, filler: int) -> Rows:
    """A row for each session.

    Args:
        temperature: at which the trainer computes log-probabilities.
        filler: a token id, for rows in which nothing is trained; TRL takes no empty ones.
    """
    made = Rows(prompt_ids=[], completion_ids=[], logprobs=[], env_mask=[], reward=[], session_id=[], tokens_left_out=[])
    for session in sessions:
        trace = one_trace(session, several)
        if trace is not None and (needed := trained_at(trace)) != temperature:
            raise CaptureError(
                "L01",
                f"session {session.result.session_id} was sampled at temperature {needed:g}, and TRL computes log-probabilities "
                f"of {temperature:g}: set `temperature` of GRPOConfig, or `sampling` of the tasks",
            )
        made["prompt_ids"].append([filler] if trace is None else trace.prompt_ids.tolist())
        made["completion_ids"].append([filler] if trace is None else trace.response_ids.tolist())
        made["logprobs"].append([0.0] if trace is None else trace.response_logprobs.tolist())
        made["env_mask"].append([0] if trace is None else trace.loss_mask.tolist())
        made["reward"].append(None if trace is None else trace.reward)
        made["session_id"].append(session.result.session_id)
        made["tokens_left_out"].append(left_out(session, trace))
    return made


def session_reward(
    reward: Sequence[float | None],
    session_id: Sequence[str],
    tokens_left_out: Sequence[int],
    log_metric: Callable[[str, float], None],
    log_extra: Callable[[str, list[str]], None],
    **_: object,
) -> list[float | None]:
    """The rewards of sessions, as TRL's reward function. TRL keeps None out of groups, and gives it the advantage 0.

    TRL logs `polar/rows_without_reward` and `polar/tokens_left_out`, the latter of a batch's sessions together.
    """
    log_metric("polar/rows_without_reward", float(sum(each is None for each in reward)))
    log_metric("polar/tokens_left_out", float(sum(tokens_left_out)))
    log_extra("session_id", list(session_id))
    return list(reward)


class _Published:
    """Stands where TRL would have a vLLM of its own, which it gives new weights before a rollout; here the rollout does."""

    def sync_weights(self) -> None: ...


def correct(trainer: Trainer) -> None:
    """Have TRL correct for the distance between engine and trainer by truncated importance sampling.

    TRL does that only for a vLLM that it runs itself; its settings `vllm_importance_sampling_…` hold here too. What it logs as
    `sampling/sampling_logp_difference` is δ, how far its log-probabilities are from the engine's.
    """
    trainer.vllm_generation, trainer._last_loaded_step, trainer.use_vllm = _Published(), -1, True


def _check(prompts: Sequence[str], trainer: Trainer) -> None:
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise UsageError("expected the id of a task as the prompt of each row, got a conversation: harnesses write their prompts")
    if trainer.tools:
        raise UsageError("GRPOTrainer has `tools`, so it would drop the mask of the sessions: leave tools to the harness")
    if trainer.accelerator.num_processes > 1:
        raise UsageError(f"expected one training process, got {trainer.accelerator.num_processes}: `polar train` takes several")
    if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
        raise UsageError(
            "GRPOTrainer trains an adapter (`peft_config`), and engines get whole weights: `polar train` merges LoRA"
        )


def _saving(trainer: Trainer) -> Callable[[Path], None]:
    model = trainer.accelerator.unwrap_model(trainer.model)

    def save(directory: Path) -> None:
        model.save_pretrained(directory)

    return save
