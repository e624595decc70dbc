"""The packed trees compute what stock models compute for each sequence alone, gradients included."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from polar.engines.embedded.weights import load_model, reload_weights
from polar.errors import UsageError
from polar.training.attention import attends, plan
from polar.training.config import ModelSpec
from polar.training.packing import Packing, layouts
from polar.training.policy import Policy, load_policy
from tests.training.forests import random_forest
from tests.training.models import Kind, tiny, tiny_dir

Gradients = dict[str, Tensor]
auto: Any = AutoModelForCausalLM


def plain(directory: Path, seed: int, weights: Tensor) -> tuple[float, Gradients]:
    """Loss and gradients as stock `transformers` computes them, each trace in a pass of its own."""
    model = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").train()
    total = torch.zeros(())
    for layout in layouts(random_forest(seed), 1, "traces"):
        logprobs = model(input_ids=torch.tensor(layout.ids)[None]).logits[0].log_softmax(-1)
        total = total + (logprobs[layout.predictors, layout.targets] * weights[layout.trained]).sum()
    total.backward()  # type: ignore[no-untyped-call]
    return float(total.detach()), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def packed(policy: Policy, seed: int, weights: Tensor, max_tokens: int, packing: Packing) -> tuple[float, Gradients]:
    total = 0.0
    for layout in layouts(random_forest(seed), max_tokens, packing):
        loss = (policy(layout).logprobs * weights[layout.trained]).sum()
        loss.backward()
        total += float(loss.detach())
    return total, {name: each.grad for name, each in policy.model.named_parameters() if each.grad is not None}


def furthest(found: Gradients, wanted: Gradients) -> float:
    """The largest relative difference of a tensor's gradient."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("packing", ["tree", "traces"])
@pytest.mark.parametrize(("max_tokens", "checkpointing"), [(50, True), (10_000, False)])
def test_gradients_equal_those_of_plain_training(
    tmp_path: Path, kind: Kind, packing: Packing, max_tokens: int, checkpointing: bool
) -> None:
    directory = tiny_dir(tmp_path, kind)
    weights = torch.rand(int(random_forest(1).loss_mask.sum()), generator=torch.Generator().manual_seed(0))
    loss, gradients = plain(directory, 1, weights)
    policy = load_policy(directory, ModelSpec(packing=packing, activation_checkpointing=checkpointing))
    found, packed_gradients = packed(policy, 1, weights, max_tokens, packing)
    assert found == pytest.approx(loss, rel=1e-5)
    assert furthest(packed_gradients, gradients) < 1e-4


def test_a_model_with_a_recurrent_state_computes_each_trace_apart_and_as_exactly(tmp_path: Path) -> None:
    directory = tiny_dir(tmp_path, "qwen3.5")
    weights = torch.rand(int(random_forest(1).loss_mask.sum()), generator=torch.Generator().manual_seed(0))
    loss, gradients = plain(directory, 1, weights)
    policy = load_policy(directory, ModelSpec())
    assert policy.packing == "traces"
    found, packed_gradients = packed(policy, 1, weights, 10_000, "traces")
    assert found == pytest.approx(loss, rel=1e-5)
    assert furthest(packed_gradients, gradients) < 1e-3, "its recurrence sums in another order on rows of another length"


def test_a_tree_is_refused_where_a_layer_keeps_a_state(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='linear_attention layers keep a state .* packing = "traces"'):
        load_policy(tiny_dir(tmp_path, "qwen3.5"), ModelSpec(packing="tree"))


def test_layers_that_nobody_proved_are_refused_by_name(tmp_path: Path) -> None:
    directory = tiny_dir(tmp_path)
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace('"full_attention"', '"chunked_attention"'))
    with pytest.raises(UsageError, match="not proven to be computed exactly: chunked_attention"):
        load_policy(directory, ModelSpec())


@pytest.mark.parametrize("setting", ["logit_scale", "final_logit_softcapping", "attn_logit_softcapping"])
def test_a_model_whose_logits_are_more_than_a_matrix_is_refused_by_name(tmp_path: Path, setting: str) -> None:
    directory = tiny_dir(tmp_path)
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace("{", f'{{\n  "{setting}": 0.5,', 1))
    with pytest.raises(UsageError, match=f"not proven to be computed exactly: {setting}"):
        load_policy(directory, ModelSpec())


def test_the_mask_of_a_gpu_says_what_the_segments_of_a_cpu_say() -> None:
    for layout in layouts(random_forest(5), 10_000, "tree"):
        tree = plan(layout, torch.device("cpu"))
        places = torch.arange(len(layout.ids))
        sparse = attends(torch.from_numpy(layout.reach), places[:, None], places[None, :])
        dense = torch.zeros_like(sparse)
        for each in tree.segments:
            own = torch.arange(each.start, each.end)
            seen = own if each.above is None else torch.cat([each.above, own])
            mask = torch.ones(len(own), len(own), dtype=torch.bool).tril() if each.mask is None else each.mask
            dense[own[:, None], seen[None, :]] = mask
        assert torch.equal(sparse, dense)


def test_weights_that_were_saved_serve_and_can_be_reloaded(tmp_path: Path) -> None:
    directory = tiny_dir(tmp_path / "model")
    policy = load_policy(directory, ModelSpec())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01)
    policy.save(tmp_path / "saved")
    policy.save(tmp_path / "saved")  # in the place of the first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "saved"]
    served = load_model(directory, "float32")
    reload_weights(served, tmp_path / "saved")
    for name, parameter in served.named_parameters():
        assert torch.equal(parameter, dict(policy.model.named_parameters())[name])
    assert (tmp_path / "saved" / "tokenizer.json").is_file()


def test_lora_changes_only_the_adapter_and_is_merged_when_saved(tmp_path: Path) -> None:
    directory = tiny_dir(tmp_path / "model")
    policy = load_policy(directory, ModelSpec(lora_rank=4))
    trained = [name for name, each in policy.named_parameters() if each.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    (layout,) = layouts(random_forest(0), 10_000, "tree")
    before = policy(layout).logprobs.detach()
    with torch.no_grad():
        for name, each in policy.named_parameters():
            if "lora_B" in name:
                each.normal_(0, 0.1)
    after = policy(layout).logprobs.detach()
    assert not torch.allclose(before, after)
    assert torch.equal(policy.reference(layout), before), "without the adapter it is the model that it was"
    policy.save(tmp_path / "saved")
    merged = load_policy(tmp_path / "saved", ModelSpec())(layout).logprobs.detach()
    assert torch.allclose(merged, after, atol=1e-4)


def test_an_adapter_is_saved_alone_and_is_what_was_trained(tmp_path: Path) -> None:
    directory = tiny_dir(tmp_path / "model")
    policy = load_policy(directory, ModelSpec(lora_rank=4))
    with torch.no_grad():
        for name, each in policy.named_parameters():
            if "lora_B" in name:
                each.normal_(0, 0.1)
    policy.save_adapter(tmp_path / "saved")
    policy.save_adapter(tmp_path / "saved")  # in the place of the first
    assert {path.name for path in (tmp_path / "saved").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not list((tmp_path / "saved").glob("model*"))
    again = PeftModel.from_pretrained(auto.from_pretrained(directory, dtype=torch.float32), tmp_path / "saved")
    expected = {name: each for name, each in policy.model.state_dict().items() if "lora_" in name}
    assert expected
    assert all(torch.equal(again.state_dict()[name], each) for name, each in expected.items())


def test_the_reference_stays_what_was_loaded(tmp_path: Path) -> None:
    policy = load_policy(tiny_dir(tmp_path), ModelSpec())
    (layout,) = layouts(random_forest(0), 10_000, "tree")
    before = policy(layout).logprobs.detach()
    policy.keep_reference()
    with torch.no_grad():
        next(policy.parameters()).mul_(1.5)
    assert torch.equal(policy.reference(layout), before)
    assert not torch.equal(policy(layout).logprobs.detach(), before)


def test_bfloat16_is_close_and_weights_stay_float32(tmp_path: Path) -> None:
    directory = tiny_dir(tmp_path, hidden_size=64)
    (layout,) = layouts(random_forest(0), 10_000, "tree")
    exact = load_policy(directory, ModelSpec())(layout).logprobs.detach()
    policy = load_policy(directory, ModelSpec(dtype="bfloat16"))
    scores = policy(layout)
    scores.logprobs.sum().backward()
    assert scores.logprobs.dtype == torch.float32
    assert {each.dtype for each in policy.parameters()} == {torch.float32}
    assert 0 < np.abs((scores.logprobs.detach() - exact).numpy()).mean() < 0.5


def test_the_models_of_these_tests_are_not_flat() -> None:
    (layout,) = layouts(random_forest(0), 10_000, "tree")
    logits = tiny()(input_ids=torch.tensor(layout.ids)[None]).logits
    assert logits.softmax(-1).max(-1).values.mean() > 0.1
