"""Sessions of a scripted policy as a trainer samples them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal
from tokenizers import Tokenizer

from polar.engines.scripted import Scripted, ScriptedCall, ScriptedEngine, scripted_server
from polar.integrations.sampler import Sampler, sampler
from polar.rollout.observer import Observer
from polar.rollout.runner import RunOptions
from polar.specs import HarnessSpec, Task
from polar.trajectory.export import Exported
from tests.integrations.letters import letters
from tests.training.models import tiny_dir

Sampling = Callable[..., AbstractContextManager[Sampler]]


def say(call: ScriptedCall) -> Scripted:
    """Twice as much where a second chat begins, or goes on."""
    return Scripted("zebra" if "say" in call.prompt_text else "many zebras")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dir(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def sampling(tiny: Path) -> Sampling:
    """`with sampling(tasks, out) as sampler`: one that asks a scripted engine."""

    @contextmanager
    def start(tasks: list[Task], out: Path, observer: Observer | None = None) -> Iterator[Sampler]:
        engine = ScriptedEngine(Tokenizer.from_file(str(tiny / "tokenizer.json")), say, model_dir=tiny, max_model_len=2048)
        with (
            start_blocking_portal() as portal,
            portal.wrap_async_context_manager(scripted_server(engine)) as url,
            sampler(tasks, RunOptions(out, url, sandbox="process", concurrency=4), observer=observer) as made,
        ):
            yield made

    return start


def silent() -> Task:
    """A task whose harness never asks."""
    return Task("silent", "say", harness=HarnessSpec("shell", {"command": "exit 3"}))


@pytest.fixture(scope="session")
def sessions(sampling: Sampling, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    """A session with one trace, one with two, and one without a reward."""
    tasks = [letters("chain", "say something"), letters("split", "say something", merged=False), silent()]
    names = [task.id for task in tasks]
    with sampling(tasks, tmp_path_factory.mktemp("run")) as made:
        return dict(zip(names, made.sample(names), strict=True))
