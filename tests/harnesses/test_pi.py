"""The preset of Pi, and the real Pi."""

import json
from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.errors import InstallError, UsageError
from polar.harnesses import node
from polar.sandboxes import Exit
from polar.specs import HarnessSpec, SamplingSpec, Task
from tests.harnesses.conftest import ENDPOINT, Start

TASK = Task("t", "--version @file /help", harness=HarnessSpec("pi"))


@pytest.fixture(scope="module")
def installed(cache_dir: Path) -> None:
    harnesses.get("pi").install(cache_dir, print)
    assert harnesses.get("pi").installed(cache_dir)


@pytest.mark.usefixtures("installed")
@pytest.mark.timeout(600)
async def test_the_real_pi_starts_in_the_sandbox(start: Start) -> None:
    ended, out, err = await start(TASK, ["--version"])
    assert (ended, out.strip()) == (Exit(0), "1.6.0"), err


@pytest.mark.heavy  # it waits for Pi's retries
@pytest.mark.usefixtures("installed")
@pytest.mark.timeout(600)
async def test_the_real_pi_takes_the_instruction_as_text_and_knows_its_model(start: Start) -> None:
    ended, out, err = await start(TASK, [])  # nobody listens: it asks in vain, a few times
    assert ended == Exit(0), err
    events = [json.loads(line) for line in out.splitlines()]
    said = [event["message"] for event in events if event["type"] == "message_end" and event["message"]["role"] == "user"]
    assert said[0]["content"] == [{"type": "text", "text": TASK.instruction}]
    failed = [event["message"] for event in events if event["type"] == "message_end" and event["message"]["role"] == "assistant"]
    assert {(message["provider"], message["model"], message["stopReason"]) for message in failed} == {
        ("polar", "policy", "error")
    }


@pytest.mark.usefixtures("installed")
def test_the_launch_says_all_that_pi_must_know(cache_dir: Path) -> None:
    task = msgspec.structs.replace(TASK, sampling=SamplingSpec(max_tokens=512))
    launch = harnesses.get("pi").launch(task, ENDPOINT, cache=cache_dir, workspace="/workspace", home="/home/agent")
    assert launch.command.stdin == task.instruction
    assert task.instruction not in launch.command.argv
    assert launch.command.env["PI_CODING_AGENT_DIR"] == "/home/agent/agent"
    provider = json.loads(launch.home_files["agent/models.json"])["providers"]["polar"]
    assert (provider["baseUrl"], provider["apiKey"]) == ("http://127.0.0.1:1/s/pk-test/v1", "pk-test")
    assert provider["models"][0]["maxTokens"] == 512
    assert provider["models"][0]["contextWindow"] == 8192 + 4096
    # Compaction starts a quarter of the real window before its end.
    assert json.loads(launch.home_files["agent/settings.json"])["compaction"] == {
        "reserveTokens": 2048 + 4096,
        "keepRecentTokens": 2048,
    }


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("options", "api", "base"),
    [
        ({}, "openai-completions", "/v1"),
        ({"api": "chat"}, "openai-completions", "/v1"),
        ({"api": "responses"}, "openai-responses", "/v1"),
        ({"api": "anthropic"}, "anthropic-messages", ""),
        ({"api": "google"}, "google-generative-ai", "/v1beta"),
    ],
)
def test_each_api_has_its_base_url(options: dict[str, str], api: str, base: str, cache_dir: Path) -> None:
    task = msgspec.structs.replace(TASK, harness=HarnessSpec("pi", options))
    launch = harnesses.get("pi").launch(task, ENDPOINT, cache=cache_dir, workspace="/workspace", home="/home/agent")
    provider = json.loads(launch.home_files["agent/models.json"])["providers"]["polar"]
    assert (provider["api"], provider["baseUrl"]) == (api, f"http://127.0.0.1:1/s/pk-test{base}")


@pytest.mark.usefixtures("installed")
def test_a_model_in_googles_api_has_a_name_that_is_one_part_of_a_path(cache_dir: Path) -> None:
    endpoint = msgspec.structs.replace(ENDPOINT, model="/models/Qwen3-8B")
    for api, name in (("google", "Qwen3-8B"), ("chat", "/models/Qwen3-8B")):
        task = msgspec.structs.replace(TASK, harness=HarnessSpec("pi", {"api": api}))
        launch = harnesses.get("pi").launch(task, endpoint, cache=cache_dir, workspace="/workspace", home="/home/agent")
        argv = launch.command.argv
        assert argv[argv.index("--model") + 1] == name
        provider = json.loads(launch.home_files["agent/models.json"])["providers"]["polar"]
        assert [model["id"] for model in provider["models"]] == [name]


def test_an_api_that_pi_does_not_speak_is_refused_with_those_that_it_does() -> None:
    with pytest.raises(UsageError, match="option 'api' is `chat` or `responses` or `anthropic` or `google`, not 'grpc'"):
        harnesses.get("pi").check(HarnessSpec("pi", {"api": "grpc"}))


def test_a_launch_without_node_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_of_the_system", lambda: None)
    with pytest.raises(InstallError, match=r"Node\.js, which pi runs on, is not installed"):
        harnesses.get("pi").launch(TASK, ENDPOINT, cache=tmp_path, workspace="/w", home="/h")
