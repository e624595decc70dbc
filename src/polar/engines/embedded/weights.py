"""The model: loaded once, its weights replaced in place, and scored by a plain forward."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from polar.engines.embedded.wire import PromptLogprob, Refused
from polar.errors import UsageError

SCORE_CHUNK = 512  # tokens whose logits exist at a time; 100 MB for a vocabulary of 50,000


def load_model(directory: Path, dtype: Literal["float32", "bfloat16"]) -> PreTrainedModel:
    """The model in `directory`, on CPU.

    Raises:
        UsageError: its attention is not plain full attention, which is all that `attention` computes.
    """
    config = AutoConfig.from_pretrained(directory).get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layers != {"full_attention"} or getattr(config, "attn_logit_softcapping", None) is not None:
        raise UsageError(
            f"the embedded engine computes full attention without soft-capping only; {config.model_type} in {directory} "
            f"has {', '.join(sorted(layers))}. Serve it with vLLM or SGLang"
        )
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    model: PreTrainedModel = loaded.eval()
    return model


def reload_weights(model: PreTrainedModel, directory: Path) -> None:
    """Copy the safetensors of `directory` into `model`. Nothing is changed unless all of them fit.

    Raises:
        Refused: files are missing or damaged, or hold other tensors than the model has.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise Refused(f"no *.safetensors in {directory}: expected the directory of a saved model", param="weights_path")
    parameters = dict(model.named_parameters())
    aliases = model.state_dict().keys() - parameters.keys()  # tied weights under their second name
    with ExitStack() as stack, torch.no_grad():
        try:
            opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        except SafetensorError as fault:
            raise Refused(f"damaged weights in {directory}: {fault}", param="weights_path") from fault
        found = {name: file for file in opened for name in file.keys() if name not in aliases}  # noqa: SIM118 (no mapping)
        wrong = {
            *(parameters.keys() ^ found.keys()),
            *(n for n in parameters.keys() & found.keys() if found[n].get_slice(n).get_shape() != list(parameters[n].shape)),
        }
        if wrong:
            some = ", ".join(sorted(wrong)[:3])
            raise Refused(f"weights in {directory} do not fit the model: {len(wrong)} tensors, {some}", param="weights_path")
        for name, parameter in parameters.items():
            parameter.copy_(found[name].get_tensor(name))


@torch.inference_mode()
def score(model: PreTrainedModel, ids: Sequence[int]) -> list[PromptLogprob]:
    """Log-probability and rank of each of `ids[1:]` given what is before it, by a forward that shares nothing with
    generation but the weights."""
    cache = DynamicCache(config=model.config)
    scored: list[PromptLogprob] = []
    for start in range(0, len(ids) - 1, SCORE_CHUNK):
        end = min(start + SCORE_CHUNK, len(ids) - 1)
        logits = model(input_ids=torch.tensor([ids[start:end]]), cache=cache, use_cache=True).logits[0].float()
        targets = torch.tensor(ids[start + 1 : end + 1])[:, None]
        logprobs = logits.log_softmax(-1).gather(1, targets)[:, 0].tolist()
        ranks = ((logits > logits.gather(1, targets)).sum(1) + 1).tolist()
        scored += map(PromptLogprob, logprobs, ranks)
    return scored
