"""How the laptop policy is made: expert sessions, a tokenizer, their retelling, supervised training until it is good enough.

It stops early on purpose: a policy that solves every task has nothing to learn by reinforcement.
"""

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct, structs
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, Qwen3Config

from polar.engines.embedded.models import SMOLLM2, resolve
from polar.engines.renderers import load_renderer
from polar.errors import UsageError
from polar.laptop.beginning import begin
from polar.laptop.expert import Dialogue, dialogues
from polar.laptop.retelling import retold
from polar.laptop.vocabulary import train_tokenizer
from polar.rollout.observer import Observer
from polar.tasks.workspace import stories, story
from polar.tokens.rendering import Renderer
from polar.training.chats import chat_forest, whole
from polar.training.config import ModelSpec, OptimizerSpec, TrainConfig
from polar.training.learner import Learner
from polar.training.packing import layouts
from polar.training.policy import Policy, load_policy
from polar.training.supervised import SftSpec, supervise
from polar.trajectory.forest import Forest, join

EVERYTHING = 1 << 40  # tokens
ROPE_THETA = 1e6  # that of Qwen3: a quarter of the rotations hardly turns within a context
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "clean_up_tokenization_spaces": False,
}


class Recipe(Struct, frozen=True):
    """The numbers of the recipe.

    Attributes:
        shares: how often a dialogue of each harness is told.
        sessions: of the expert with each harness.
        vocabulary: tokens at most for what varies; static lines come on top.
        enough: mean probability over harnesses that a sampled dialogue is the expert's to the last token, on training tasks that
            were kept apart; training stops there.
        looked_at: dialogues of each harness that were kept apart, `look_every` steps.
    """

    shares: dict[str, float]
    sessions: int = 9
    vocabulary: int = 1_024
    hidden: int = 256
    layers: int = 2
    heads: int = 8
    intermediate: int = 768
    context: int = 32_768
    batch: int = 32
    lr: float = 1e-3
    warmup_steps: int = 20
    steps: int = 2_000
    enough: float = 0.3
    looked_at: int = 32
    look_every: int = 10
    seed: int = 0


LAPTOP = Recipe({"pi": 0.17, "claude_code": 0.17, "mini_swe_agent": 0.2, "codex": 0.22, "qwen_code": 0.24})
LARGER = structs.replace(LAPTOP, lr=1e-5)  # for a model that was trained before
Note = Callable[[str], None]


class Teller(IterableDataset[list[Forest]]):
    """Tells expert dialogues again, as trees to train on."""

    def __init__(self, told: Sequence[Dialogue], recipe: Recipe, renderer: Renderer) -> None:
        self._by_kind: dict[tuple[str, str], list[Dialogue]] = {}
        for each in told:
            self._by_kind.setdefault((each.harness, each.story.kind), []).append(each)
        self._recipe = recipe
        self._renderer = renderer

    def batch(self, name: str, size: int, harness: str = "") -> Forest:
        """`size` dialogues, of one harness or of all, the same for the same name."""
        rng = random.Random(f"{self._recipe.seed}/{name}")
        shares = self._recipe.shares
        harnesses = [harness] * size if harness else rng.choices([*shares], [*shares.values()], k=size)
        return join([self._one(rng, each, f"{name}/{place}") for place, each in enumerate(harnesses)])

    def __iter__(self) -> Iterator[list[Forest]]:
        """Batches to train on, without end."""
        for number in count():
            yield [self.batch(f"train/{number}", self._recipe.batch)]

    def _one(self, rng: random.Random, harness: str, name: str) -> Forest:
        fresh = story("train", rng)
        dialogue = retold(rng.choice(self._by_kind[harness, fresh.kind]), fresh, rng)
        return chat_forest(self._renderer, whole(dialogue.messages, dialogue.tools), name)


async def make(recipe: Recipe, out: Path, observer: Observer, model: str = "") -> float:
    """Make the policy in `out`; how good it is, as `Recipe.enough` measures it.

    Args:
        model: a directory to begin with, with its own tokenizer; "" begins with a tokenizer and weights of its own.

    Raises:
        UsageError: the model never got good enough.
        InfrastructureError: a harness cannot be run.
    """
    told: list[Dialogue] = []
    with tempfile.TemporaryDirectory(prefix="polar-laptop-") as scratch:
        for harness in recipe.shares:
            observer.note(f"the expert works through {harness}")
            told += await dialogues(harness, recipe.sessions, Path(scratch) / harness, observer)
    loop, stopped = asyncio.get_running_loop(), Event()

    def note(line: str) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(observer.note, line)

    def work() -> float:
        directory = resolve(model) if model else _fresh_model(recipe, told, out, note)
        return _trained(recipe, told, directory, out, note)

    try:
        return await asyncio.to_thread(work)
    finally:
        stopped.set()


def _fresh_model(recipe: Recipe, told: Sequence[Dialogue], out: Path, note: Note) -> Path:
    """A directory with a tokenizer of these dialogues, and weights to begin with."""
    out.mkdir(parents=True, exist_ok=True)
    note("training the tokenizer")
    tokenizer = train_tokenizer(_texts(recipe, told), recipe.vocabulary)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(TOKENIZER_CONFIG)))
    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=-(-tokenizer.get_vocab_size() // 64) * 64,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.hidden // recipe.heads,
        max_position_embeddings=recipe.context,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        bos_token_id=None,
    )
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    begin(model)
    model.save_pretrained(out)
    return out


def _texts(recipe: Recipe, told: Sequence[Dialogue]) -> list[str]:
    """What harnesses send, as text, with other stories and days: what varies is not to become tokens."""
    renderer = load_renderer(resolve(SMOLLM2))
    rng = random.Random(recipe.seed)
    by_kind = {kind: [each for each in stories("train", 300, 1) if each.kind == kind] for kind in ("write", "copy", "pick")}
    texts = []
    for dialogue in told:
        again = retold(dialogue, rng.choice(by_kind[dialogue.story.kind]), rng)
        texts.append(renderer.decode(renderer.render(again.messages, again.tools).tolist()))
    return texts


def _trained(recipe: Recipe, told: Sequence[Dialogue], begin: Path, out: Path, note: Note) -> float:
    spec = ModelSpec(str(begin), max_tokens=1 << 20)
    policy = load_policy(begin, spec)
    teller = Teller(told, recipe, load_renderer(begin))
    learner = Learner(policy, TrainConfig(model=spec, optimizer=OptimizerSpec(lr=recipe.lr, weight_decay=0.01)))
    kept = {harness: teller.batch(f"kept/{harness}", recipe.looked_at, harness) for harness in recipe.shares}
    reached = 0.0

    def enough(step: int, values: dict[str, float]) -> bool:
        nonlocal reached
        if step % recipe.look_every:
            return False
        found = {harness: probability(policy, forest) for harness, forest in kept.items()}
        reached = sum(found.values()) / len(found)
        shown = ", ".join(f"{harness} {value:.0%}" for harness, value in found.items())
        note(f"step {step}: loss {values['loss']:.3f}, the expert's dialogues: {reached:.0%} ({shown})")
        return reached >= recipe.enough

    batches = DataLoader(teller, batch_size=None, num_workers=1, prefetch_factor=8)  # told by a process beside this one
    supervise(learner, batches, SftSpec(recipe.steps, recipe.lr, recipe.warmup_steps, decay="none"), enough)
    if reached < recipe.enough:
        raise UsageError(f"after {recipe.steps} steps only {reached:.1%} of dialogues are the expert's; allow more steps")
    policy.save(out)
    auto: Any = AutoModelForCausalLM
    auto.from_pretrained(out, dtype=torch.bfloat16).save_pretrained(out)
    return reached


@torch.no_grad()
def probability(policy: Policy, forest: Forest) -> float:
    """Mean probability over sessions that all of a session's learned tokens are sampled."""
    (layout,) = layouts(forest, EVERYTHING, "tree")
    logprobs = policy(layout).logprobs.numpy()
    owners = np.repeat(forest.sessions, np.diff(forest.bounds))[forest.loss_mask.astype(bool)][layout.trained]
    return float(np.exp(np.bincount(owners, logprobs, len(forest.session_ids))).mean())
