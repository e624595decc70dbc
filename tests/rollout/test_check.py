"""What `polar harness check` says of harnesses that work, and of those that do not."""

import tempfile
from pathlib import Path

import pytest

from polar import harnesses
from polar.rollout.check import INSTRUCTION, Checked, check

pytestmark = pytest.mark.heavy  # a quarter of a minute that `make test` does not have


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sessions are kept; each test its own, so that what is left can be seen."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


async def checked(name: str, model_dir: Path, said: list[str] | None = None) -> Checked:
    path = name if name in harnesses.names() else f"tests.rollout.probed:{name}"
    return await check(path, harnesses.get(path), model_dir, (said if said is not None else []).append)


async def test_one_that_works_is_described_and_leaves_nothing_behind(smollm2_dir: Path, scratch: Path) -> None:
    said: list[str] = []
    seen = await checked("Good", smollm2_dir, said)
    assert (seen.ok, seen.verdict) == (True, "ok")
    assert (seen.harness, seen.version, seen.dialects, seen.streamed) == ("good", "1.0", ("openai_chat",), "no")
    assert (seen.calls, seen.kinds, seen.traces, seen.breaks) == (3, {"agent": 3}, 1, {})
    assert (seen.files, seen.tool_ids, seen.other_ids) == (3, (3, 3), 0)
    assert (seen.unserved, seen.unknown_routes, seen.size) == ((), (), "")
    assert seen.prompt_tokens > len(INSTRUCTION.split())
    assert 0 < seen.seconds < 60
    assert said == ["good 1.0: playing its probe"]
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("Lazy", "hello.txt is missing; one.txt is missing; two.txt is missing"),
        ("Sloppy", "hello.txt holds b'hullo\\n', not b'hello\\n'"),
        ("Short", "it got 1 answers, its probe has 3; one.txt is missing; two.txt is missing"),
        ("Silent", "good ended with status 3 without a model call; its last words: I have nothing to say"),
        ("Crashing", "the harness died of signal 11; its last words: out of cheese"),
    ],
)
async def test_what_is_wrong_is_said_and_its_session_kept(name: str, wrong: str, smollm2_dir: Path) -> None:
    seen = await checked(name, smollm2_dir)
    assert (seen.ok, seen.verdict.replace(f"tests.rollout.probed:{name}", "good")) == (False, wrong)
    assert (Path(seen.run) / "ledger.db").is_file()


async def test_routes_that_nobody_serves_are_told_and_no_fault(smollm2_dir: Path) -> None:
    seen = await checked("Curious", smollm2_dir)
    assert (seen.verdict, seen.unknown_routes) == ("ok", ("GET /v1/weather, 1 ×",))


async def test_one_that_cannot_be_installed_is_a_verdict_and_no_error(smollm2_dir: Path, scratch: Path) -> None:
    said: list[str] = []
    seen = await checked("Unpacked", smollm2_dir, said)
    assert (seen.verdict, seen.calls, seen.run) == ("no network: check the connection and try again", 0, "")
    assert said == ["fetching it"]
    assert list(scratch.iterdir()) == []


async def test_a_bug_in_a_class_of_ones_own_is_a_verdict_and_no_error(smollm2_dir: Path) -> None:
    assert (await checked("Broken", smollm2_dir)).verdict == "its class failed: KeyError('home')"


IN_CI = ["pi", "codex", "claude_code", "gemini_cli", "qwen_code", "opencode", "mini_swe_agent"]
ELSEWHERE = ["openhands", "copilot_cli", "mistral_vibe", "continue_cli", "cline", "gptme", "hermes", "aider"]


def test_every_harness_is_checked_below() -> None:
    assert sorted([*IN_CI, *ELSEWHERE, "shell"]) == sorted(harnesses.names())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.heavy) for name in IN_CI),
        *(pytest.param(name, marks=pytest.mark.wide) for name in ELSEWHERE),
    ],
)
async def test_real_harnesses_work(name: str, smollm2_dir: Path) -> None:
    seen = await checked(name, smollm2_dir)
    assert (seen.verdict, seen.traces, seen.tool_ids) == ("ok", 1, (0, 0) if name == "aider" else (3, 3))
    assert seen.size.endswith(" MB")
