"""The policy as the trainer computes it: log-probabilities of trained tokens, and weights that every engine can load."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from polar.errors import UsageError
from polar.training import attention
from polar.training.batch import Int64Array, Layout
from polar.training.config import ModelSpec
from polar.training.heads import score
from polar.training.packing import Packing

TREE_LAYERS = {"full_attention"}
TRACE_LAYERS = TREE_LAYERS | {"linear_attention", "sliding_attention"}
# Settings of a model whose logits or attention are more than those of a plain output matrix and a plain softmax.
OTHER_LOGITS = ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")
NOT_MODEL = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.gguf")  # files that a saved model replaces


class Scores(NamedTuple):
    """Of the r trained tokens of a layout: log-probabilities, float32[r], and entropies, float32[r], without gradient."""

    logprobs: Tensor
    entropy: Tensor


class Policy(nn.Module):
    """A causal language model that computes layouts. Weights are float32, whatever the pass is computed in.

    Attributes:
        packing: how batches are to be laid out for it.
    """

    def __init__(self, model: nn.Module, packing: Packing, directory: Path, spec: ModelSpec) -> None:
        super().__init__()
        self.model = model
        self.packing: Packing = packing
        self._directory = directory
        self._spec = spec
        self._reference: list[nn.Module] = []  # in a list, so that it is no part of this module

    def forward(self, layout: Layout, temperature: Tensor | None = None) -> Scores:
        """Score the trained tokens of a layout; `temperature` float32[r] divides their logits."""
        return self._scores(self._causal(self.model), layout, temperature)

    @torch.no_grad()
    def reference(self, layout: Layout, temperature: Tensor | None = None) -> Tensor:
        """Log-probabilities under the weights that it was loaded with, float32[r]; see `keep_reference`."""
        if self._spec.lora_rank:
            switch: Any = self.model
            with switch.disable_adapter():
                scores: Scores = self(layout, temperature)  # a call, so that sharded weights are gathered
                return scores.logprobs
        return self._scores(self._causal(self._reference[0]), layout, temperature).logprobs

    def keep_reference(self) -> None:
        """Keep today's weights for `reference`. With LoRA they are there anyway."""
        if not self._spec.lora_rank and not self._reference:
            self._reference.append(deepcopy(self.model).requires_grad_(False).eval())

    @property
    def vocabulary(self) -> int:
        """How many token ids it knows."""
        return int(self._causal(self.model).lm_head.weight.shape[0])

    def twin(self) -> "Policy":
        """A policy of its own, as this one was when it was loaded."""
        return load_policy(self._directory, self._spec)

    def save(self, directory: Path) -> None:
        """Write a model directory that every engine can serve; it takes the place of an older one, complete or not at all."""
        with _replaced(directory) as building:
            for file in self._directory.iterdir():
                if file.is_file() and not any(file.match(pattern) for pattern in NOT_MODEL):
                    shutil.copyfile(file, building / file.name)
            self._merged().save_pretrained(building, state_dict=self.weights())

    def save_adapter(self, directory: Path) -> None:
        """Write the LoRA adapter alone, as peft and vLLM read it; complete or not at all."""
        with _replaced(directory) as building:
            adapted: Any = self.model
            adapted.save_pretrained(building, save_embedding_layers=False)

    def weights(self) -> dict[str, Tensor]:
        """All weights by their names in the stock model, LoRA merged."""
        return {name: tensor.detach().cpu() for name, tensor in self._merged().state_dict().items()}

    def _merged(self) -> PreTrainedModel:
        if not self._spec.lora_rank:
            plain: Any = self.model
            return plain  # type: ignore[no-any-return]
        merged: Any = deepcopy(self.model)
        return merged.merge_and_unload()  # type: ignore[no-any-return]

    def _causal(self, model: nn.Module) -> Any:
        adapted: Any = model
        return adapted.get_base_model() if self._spec.lora_rank else model

    def _scores(self, causal: Any, layout: Layout, temperature: Tensor | None) -> Scores:
        device = causal.lm_head.weight.device
        low = self._spec.dtype == "bfloat16"
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            hidden = self._packed(causal, layout, device) if self._shares(causal) else self._rows(causal, layout, device)
            targets = torch.from_numpy(layout.targets).to(device)
            return Scores(*score(hidden, causal.lm_head.weight, targets, temperature))

    def _shares(self, causal: Any) -> bool:
        return bool(causal.config._attn_implementation == attention.NAME)

    def _packed(self, causal: Any, layout: Layout, device: torch.device) -> Tensor:
        """Hidden states [r, h] of what predicts the trained tokens, all nodes in one sequence."""
        ids = torch.from_numpy(layout.ids).to(device)[None]
        positions = torch.from_numpy(layout.positions).to(device)[None]
        tree = attention.plan(layout, device)
        out = causal.model(input_ids=ids, position_ids=positions, use_cache=False, tree=tree)
        return _first(out)[0, torch.from_numpy(layout.predictors).to(device)]

    def _rows(self, causal: Any, layout: Layout, device: torch.device) -> Tensor:
        """The same with a row for each root, filled up on the right: a recurrent state begins anew in each."""
        ids, places = _rows(layout)
        hidden = _first(causal.model(input_ids=torch.from_numpy(ids).to(device), use_cache=False))
        return hidden.flatten(0, 1)[torch.from_numpy(places[layout.predictors]).to(device)]


def _first(out: Any) -> Tensor:
    hidden: Tensor = out.last_hidden_state
    return hidden


def _rows(layout: Layout) -> tuple[Int64Array, Int64Array]:
    """Ids [rows, longest], and the place of each token in them laid flat, int64[n]."""
    lengths = np.diff(layout.bounds)
    longest = int(lengths.max())
    places = np.arange(len(layout.ids)) - np.repeat(layout.bounds[:-1] - np.arange(len(lengths)) * longest, lengths)
    ids = np.zeros(len(lengths) * longest, np.int64)
    ids[places] = layout.ids
    return ids.reshape(len(lengths), longest), places


def load_policy(directory: Path, spec: ModelSpec) -> Policy:
    """The model in `directory`, ready to be trained.

    Raises:
        UsageError: its layers cannot be computed exactly, or not in the packing that is asked for.
    """
    attention.register()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config: Any = AutoConfig.from_pretrained(directory).get_text_config()
    packing = _packing(config, spec, directory)
    shares = set(_layers(config)) <= TREE_LAYERS
    auto: Any = AutoModelForCausalLM
    kind = attention.NAME if shares else "sdpa"
    try:
        model = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation=kind)
        plain = model.lm_head.bias is None
    except (AttributeError, ValueError) as fault:  # no such head, or an attention that this cannot be
        raise UsageError(f"{directory}: this is no model that can be trained: {fault}") from fault
    if not plain:
        raise UsageError(f"{directory}: its output matrix has a bias, which is not proven to be computed exactly")
    model.config.use_cache = False
    if spec.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if spec.lora_rank:
        model = _with_lora(model, spec)
    model.train()
    if torch.cuda.is_available():
        model.to("cuda")
    return Policy(model, packing, directory, spec)


def _layers(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or ["full_attention"])


def _packing(config: Any, spec: ModelSpec, directory: Path) -> Packing:
    layers = set(_layers(config))
    unknown = sorted(layers - TRACE_LAYERS)
    unknown += [name for name in OTHER_LOGITS if getattr(config, name, None) not in (None, 1, 1.0)]
    if unknown:
        raise UsageError(f"{directory}: its layers are not proven to be computed exactly: {', '.join(unknown)}")
    if layers <= TREE_LAYERS:
        return "traces" if spec.packing == "traces" else "tree"
    if spec.packing == "tree":
        raise UsageError(
            f"{directory}: {', '.join(sorted(layers - TREE_LAYERS))} layers keep a state that a tree cannot fork: "
            'expected packing = "traces" or "auto" in [model]'
        )
    return "traces"


def _with_lora(model: PreTrainedModel, spec: ModelSpec) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=spec.lora_rank, lora_alpha=spec.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


@contextmanager
def _replaced(directory: Path) -> Iterator[Path]:
    """A directory to fill, which then takes the place of `directory`."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        yield building
        building.chmod(0o755)
        if directory.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{directory.name}-old-", dir=directory.parent))
            directory.rename(old / "it")
            building.rename(directory)
            shutil.rmtree(old)
        else:
            building.rename(directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)
