"""The engine's weights are the trainer's, or nothing is begun. The engine is the embedded one, on tiny models."""

from pathlib import Path

import pytest
import torch
from msgspec import structs

from polar.engines.launch import embedded_engine
from polar.engines.renderers import load_renderer
from polar.engines.served import served
from polar.engines.vllm import VllmEngine
from polar.errors import UsageError
from polar.rollout.folder import RunFolder
from polar.store.ledger import LedgerReader
from polar.training.config import TrainConfig
from polar.training.learner import Learner
from polar.training.loop import train
from polar.training.packing import Packing
from polar.training.policy import load_policy
from polar.training.proof import prove_model
from tests.training.bandit import Steps, config, tasks
from tests.training.models import tiny_dir

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dir(tmp_path_factory.mktemp("model"))


def learner_of(model: Path, packing: Packing = "tree") -> Learner:
    spec = structs.replace(TrainConfig().model, packing=packing)
    return Learner(load_policy(model, spec), TrainConfig())


async def test_the_same_weights_are_found_the_same_and_changed_ones_are_not(model: Path, tmp_path: Path) -> None:
    async with embedded_engine(str(model), log=tmp_path / "log") as process:
        engine = VllmEngine(process.url, process.key)
        try:
            policy = await served(engine, load_renderer(model))
            for packing in ("tree", "traces"):
                learner = learner_of(model, packing)
                said = await prove_model(policy, learner, str(model), 1e-4)
                assert said.startswith("the engine has the trainer's weights: mean δ ")
            with torch.no_grad():
                for parameter in learner.policy.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
            with pytest.raises(UsageError, match=f"other weights than some/where: over .* mean δ .* it serves {model}"):
                await prove_model(policy, learner, "some/where", 0.05)
        finally:
            await engine.close()


async def test_a_model_with_a_larger_vocabulary_is_refused_before_it_is_computed(model: Path, tmp_path: Path) -> None:
    async with embedded_engine(str(model), log=tmp_path / "log") as process:
        engine = VllmEngine(process.url, process.key)
        try:
            policy = await served(engine, load_renderer(model))
            smaller = learner_of(tiny_dir(tmp_path / "smaller", vocab_size=200, eos_token_id=0, pad_token_id=0))
            with pytest.raises(UsageError, match="another model than .*vocabulary ends at 199"):
                await prove_model(policy, smaller, str(model), 0.05)
        finally:
            await engine.close()


async def test_a_wrong_model_behind_the_url_is_refused_before_any_session(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tiny_dir(tmp_path / "wrong", seed=1)
    async with embedded_engine(str(wrong), log=tmp_path / "log") as process:
        monkeypatch.setenv("POLAR_ENGINE_KEY", process.key)
        spec = config(model, 1)
        spec = structs.replace(spec, rollout=structs.replace(spec.rollout, engine=process.url))
        with pytest.raises(UsageError, match=f"other weights than {model}.*it serves {wrong}"):
            await train(spec, tasks(), tmp_path / "run", Steps())
    ledger = LedgerReader.open(RunFolder(tmp_path / "run").ledger)
    try:
        assert ledger.sessions() == []
    finally:
        ledger.close()
