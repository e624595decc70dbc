"""A step of TRL's GRPOTrainer on given sequences, in TRL's own environment: `python trl_step.py MODEL ROWS ROUNDS`."""

import json
import resource
import sys
import tempfile
import time
from statistics import median
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """How long each step is."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def peak() -> float:
    """MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024


def main(directory: str, rows: list[dict[str, Any]], rounds: int) -> None:
    size = sum(row["group"] == 0 for row in rows)
    by_group: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_group.setdefault(str(row["group"]), []).append(row)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"t{place}": place for place in range(2, model.config.vocab_size)}
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        turn: dict[str, int] = {}
        chosen = []
        for prompt in prompts:
            place = turn.get(prompt, 0)
            turn[prompt] = place + 1
            chosen.append(by_group[prompt][place])
        return {
            "prompt_ids": [row["prompt_ids"] for row in chosen],
            "completion_ids": [row["completion_ids"] for row in chosen],
            "logprobs": [[0.0] * len(row["completion_ids"]) for row in chosen],
        }

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(place % 2) for place in range(len(completion_ids))]

    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            max_steps=rounds + 1,
            per_device_train_batch_size=len(rows),
            num_generations=size,
            learning_rate=1e-5,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        )
        trainer = GRPOTrainer(
            model=model,
            args=config,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": group} for group in by_group]),
            rollout_func=rollouts,
            reward_funcs=[reward],
            callbacks=[clock],
        )
        before = peak()
        trainer.train()
    print(json.dumps({"computed": -1, "seconds": median(clock.seconds[1:]), "memory": peak() - before}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
