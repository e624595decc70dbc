"""The commands that train and evaluate: what they refuse, and with which words."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from polar.cli import app
from polar.errors import UsageError
from polar.specs import Accounting, SamplingSpec, SessionResult, Task, Timing
from polar.tasks.files import load
from polar.training.chats import read_chats
from polar.training.config import load_config
from polar.training.evaluation import Evaluation, evaluation, gain, read, write
from polar.training.metrics import Metrics
from tests.training.models import tiny_dir


def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*words])
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[model]\nlora = 4", "Object contains unknown field `lora` - at `$.model`"),
        ("[run]\nsteps = 'many'", "Expected `int`, got `str` - at `$.run.steps`"),
        ("[rollout]\nschedule = 'later'", "Invalid enum value 'later' - at `$.rollout.schedule`"),
        ("[rollout]\npublish = 'adapter'", "expected lora_rank above 0 in [model]"),
        ("[model", "this is not TOML"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused_with_its_place(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(UsageError) as refusal:
        load_config(tmp_path / "c.toml")
    assert why in str(refusal.value)
    status, output = said("train", str(tmp_path / "c.toml"))
    assert status == 2
    assert why in output


def test_the_examples_are_configurations() -> None:
    for path in sorted((Path(__file__).parents[2] / "examples").rglob("*.toml")):
        load_config(path)


def test_a_configuration_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert said("train", str(tmp_path / "none.toml")) == (
        2,
        f"error: {tmp_path / 'none.toml'}: it cannot be read: No such file or directory",
    )


def test_plot_draws_what_there_is_and_names_what_there_is_not(tmp_path: Path) -> None:
    Metrics(tmp_path).write(1, {"reward": 1.0})
    status, output = said("plot", str(tmp_path))
    assert (status, output) == (0, f"{tmp_path / 'curves.png'}: reward")
    status, output = said("plot", str(tmp_path), "--metric", "nothing")
    assert status == 2
    assert "none of nothing is among the metrics" in output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "--out", "none/curves.png"], "none/curves.png: there is no directory none to write it to"),
        (["run", "--out", "curves.xyz"], "curves.xyz: expected a picture's name, that ends in .png, .svg, .pdf"),
        (["run", "--out", "curves"], "curves: expected a picture's name"),
        (["none"], "none/metrics.jsonl: No such file or directory; expected the metrics of a training run"),
    ],
)
def test_plot_says_what_it_expects(home: Path, words: list[str], expected: str) -> None:
    Metrics(home / "run").write(1, {"reward": 1.0})
    status, output = said("plot", *words)
    assert status == 2
    assert expected in output


def test_a_bad_chat_is_named_by_file_and_line(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    quiet = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "weight": 0}]}
    chats.write_bytes(b"\n".join([msgspec.json.encode(good), b"", msgspec.json.encode(quiet), b'{"messages": 3}']))
    found = read_chats(chats)
    assert next(found).trained == {1}
    assert next(found).trained == frozenset()
    with pytest.raises(UsageError, match=r"chats.jsonl:4: expected a chat"):
        next(found)


def earlier(rewards: dict[str, tuple[float, ...]], temperature: float = 1.0) -> Evaluation:
    sampling = {name: SamplingSpec(temperature, max_tokens=48) for name in rewards}
    return Evaluation("pi", "laptop", rewards, 0, sampling, 2.0, 100, 1.5)


def asked(*names: str, samples: int = 2) -> list[Task]:
    return [Task(name, "do it", samples=samples) for name in names]


def test_an_evaluation_is_kept_and_compared(tmp_path: Path) -> None:
    before, after = earlier({"a": (0.0, 1.0), "b": (0.0, 0.0)}), earlier({"a": (1.0, 1.0), "b": (0.0, 1.0)})
    write(tmp_path, {"pi": before})
    assert read(tmp_path) == {"pi": before}
    assert gain(before, after).value == 0.5
    with pytest.raises(UsageError, match="holds no evaluation.json"):
        read(tmp_path / "none")


def test_a_session_is_solved_by_a_whole_reward_and_no_less() -> None:
    found = earlier({"a": (0.5, 0.5), "b": (1.0, 0.9)})
    assert found.pass_at_1.value == 0.25
    assert found.at_k(2) == 0.5
    assert found.reward == pytest.approx(0.725)
    assert gain(found, earlier({"a": (0.9, 0.9), "b": (1.0, 0.0)})).value == 0


def test_sessions_beyond_those_that_are_asked_for_are_left_out() -> None:
    results = [
        SessionResult(f"s{sample}", "a", sample, "completed", float(sample > 1), 1, 1, Accounting(), Timing())
        for sample in range(4)
    ]
    found = evaluation("pi", "laptop", asked("a"), results)
    assert found.rewards == {"a": (0.0, 0.0)}


@pytest.mark.parametrize(
    ("before", "what"),
    [
        (earlier({"france": (1.0, 1.0)}), "tasks"),
        (earlier({task.id: (1.0, 1.0) for task in load(["demo"])}, 0.5), "sampling parameters"),
        (earlier({task.id: (1.0,) for task in load(["demo"])}), "sessions a task"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(tmp_path: Path, before: Evaluation, what: str) -> None:
    write(tmp_path, {"pi": before})
    words = ["eval", "demo", "--harness", "pi", "--samples", "2", "--engine", "http://127.0.0.1:9"]
    status, output = said(*words, "--out", str(tmp_path / "after"), "--against", str(tmp_path))
    assert status == 2
    assert f"they differ in {what}" in output
    assert not (tmp_path / "after").exists()


@pytest.mark.heavy
def test_an_evaluation_runs_sums_up_and_compares(tmp_path: Path) -> None:
    words = ["eval", "workspace:held_out:2", "--harness", "codex", "--samples", "2", "--concurrency", "4", "--model"]
    model = str(tiny_dir(tmp_path / "model", max_position_embeddings=65_536))
    status, output = said(*words, model, "--out", str(tmp_path / "before"))
    assert status == 0, output
    assert "codex 4 0.0" in output, "a model that knows nothing solves nothing"
    status, output = said(*words, model, "--out", str(tmp_path / "after"), "--against", str(tmp_path / "before"))
    assert status == 0, output
    assert "gain (95 %)" in output
    assert read(tmp_path / "after")["codex"].sessions == 4
    other = str(tiny_dir(tmp_path / "other", seed=1))
    status, output = said(*words, other, "--out", str(tmp_path / "after"))
    assert status == 2
    assert "holds sessions of the model in" in output


@pytest.mark.heavy
def test_sft_learns_chats_and_its_model_serves(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    lines = [
        msgspec.json.encode({"messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]})
        for word in ("mora", "tevi", "lunsa")
    ]
    chats.write_bytes(b"\n".join(lines))
    model = str(tiny_dir(tmp_path / "model"))
    words = ["sft", str(chats), "--model", model, "--epochs", "40", "--batch", "3", "--lr", "1e-2"]
    status, output = said(*words, "--out", str(tmp_path / "out"))
    assert status == 0, output
    from polar.training.metrics import read as lines_of

    losses = [line["loss"] for line in lines_of(tmp_path / "out" / "metrics.jsonl")]
    assert losses[-1] < losses[0] / 2
    status, output = said("engine", "check", "embedded", "--model", str(tmp_path / "out" / "model"))
    assert status == 0, output
