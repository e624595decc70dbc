"""Steps of TRL's GRPOTrainer on sessions, run where TRL is installed: `python -m tests.e2e.trl_steps MODEL OUT`.

What its loss gets is written to OUT/seen.jsonl, a line a row; what it logs to OUT/logs.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from polar.integrations.sampler import sampler
from polar.integrations.trl import Rollouts, correct, session_reward
from polar.rollout.runner import RunOptions
from tests.integrations.letters import letters

STEPS, TASKS, GROUP = 2, 2, 4


def watch(file: Path) -> None:
    """Write down what the loss gets."""
    compute: Any = GRPOTrainer._compute_loss

    def seeing(trainer: Any, model: Any, inputs: dict[str, Any]) -> Any:
        with file.open("a") as lines:
            for row in range(len(inputs["prompt_ids"])):
                kept = inputs["completion_mask"][row].bool()
                seen = {
                    "prompt_ids": inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist(),
                    "completion_ids": inputs["completion_ids"][row][kept].tolist(),
                    "mask": inputs["tool_mask"][row][kept].tolist(),
                    "logprobs": inputs["sampling_per_token_logps"][row][kept].tolist(),
                    "advantage": float(inputs["advantages"][row]),
                    "step": trainer.state.global_step,
                }
                lines.write(json.dumps(seen) + "\n")
        return compute(trainer, model, inputs)

    GRPOTrainer._compute_loss = seeing


def main(model: str, out: Path) -> None:
    watch(out / "seen.jsonl")
    torch.set_num_threads(1)
    tasks = [letters("say", "say something"), letters("more", "say more, and much of it")]
    config = GRPOConfig(
        output_dir=str(out / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=TASKS * GROUP,
        num_generations=GROUP,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
    )
    options = RunOptions(out / "run", engine="embedded", model=model, sandbox="process", concurrency=4)
    with sampler(tasks, options) as sessions:
        trainer = GRPOTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": task.id} for task in tasks]),
            rollout_func=Rollouts(sessions),
            reward_funcs=[session_reward],
        )
        correct(trainer)
        trainer.train()
    (out / "logs.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
