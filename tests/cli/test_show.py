"""What `polar show` tells of runs and sessions, and what it never lets through."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from polar.cli.console import visible
from polar.cli.runs import Run
from polar.cli.session import asides
from polar.cli.tokens import Writer
from polar.engines.renderers import load_renderer
from polar.rollout.folder import RunFolder
from polar.store.captured import read_captured
from polar.trajectory.builders import build
from tests.audit.damage import WORK, Damage
from tests.cli.conftest import Polar


def session_id(run: RunFolder, place: int = 0) -> str:
    return Run.read(run.path).sessions[place].session_id


def test_a_run_has_tasks_and_sessions(polar: Polar, run: RunFolder) -> None:
    told = polar("show", run.path)
    assert told.exit_code == 0
    for expected in ("files 0.50 (2)", "files#0", "timed_out", "EngineError", "aborted", session_id(run)):
        assert " ".join(expected.split()) in " ".join(told.output.split())


def test_a_session_is_found_by_every_name(polar: Polar, run: RunFolder) -> None:
    name = session_id(run)
    for arguments in ([run.path / name], [name], [name, "--run", run.path]):
        told = polar("show", *arguments)
        assert (told.exit_code, told.output.startswith(f"{name} files#0 completed · reward 1")) == (0, True)


def test_what_does_not_exist_is_named(polar: Polar, run: RunFolder) -> None:
    assert "neither the folder of a run" in polar("show", "nothing").stderr
    assert "there is no session 'nothing' in" in polar("show", run.path / "nothing").stderr


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: d.node(WORK, 2, "parent", 4), "error: tree: the token tree of session"),
        (lambda d: d.node(WORK, d.sampled(WORK, 1), "offset", 10_000), "hangs at token 10000 of node"),
        (lambda d: d.capture("DELETE FROM nodes WHERE session = ? AND node_id > 2", WORK), "and there is no"),
        (lambda d: d.capture("DELETE FROM calls WHERE session = ? AND ordinal = 0", WORK), "what is stored of it is incomplete"),
        (lambda d: d.node(WORK, 0, "ids", b"123"), "what is stored of it is incomplete"),
    ],
)
def test_a_damaged_session_is_an_error_and_no_traceback(
    polar: Polar, run: RunFolder, damage: Callable[[Damage], object], said: str
) -> None:
    damage(Damage(run))
    for told in (polar("show", session_id(run)), polar("export", run.path, "--format", "json")):
        assert told.exit_code == 1
        assert said in told.stderr
    assert not (run.path / "traces.jsonl").exists()


def test_a_path_that_cannot_be_is_an_error_and_no_traceback(polar: Polar) -> None:
    told = polar("show", "x" * 5000)
    assert told.exit_code == 1
    assert "File name too long" in told.stderr


def test_messages_then_tokens(polar: Polar, run: RunFolder) -> None:
    told = polar("show", session_id(run)).output
    assert "→ bash {" in told
    assert "<|im_start|>user\nDo it.<|im_end|>\n<|im_start|>assistant\n⟦I look. <tool_call>" in told
    assert told.index("→ bash {") < told.index("⟦I look.")
    assert "3 calls · prompt 193" in told
    assert "policy version 0" in told
    assert "trained + excluded (–) · 1 traces by prefix_merging" in told


def test_only_messages_or_only_tokens(polar: Polar, run: RunFolder) -> None:
    messages, tokens = polar("show", session_id(run), "--messages").output, polar("show", session_id(run), "--tokens").output
    assert ("→ bash" in messages, "<|im_start|>" in messages) == (True, False)
    assert ("→ bash" in tokens, "<|im_start|>" in tokens) == (False, True)


def test_per_request_has_a_trace_per_call(polar: Polar, run: RunFolder) -> None:
    assert polar("show", session_id(run), "--builder", "per_request").output.count("1 calls · prompt") == 3


def test_what_is_not_trained_is_told_with_its_reason(polar: Polar, run: RunFolder) -> None:
    told = polar("show", session_id(run, 2)).output
    assert "not trained" in told
    assert "superseded" in told
    assert "This is a long answer" in told


def test_logprobs_on_demand(polar: Polar, run: RunFolder) -> None:
    told = polar("show", session_id(run), "--tokens", "--logprobs").output
    assert "<|im_end|>(-" in told
    assert "✓(-" in told, "the tokens of one character stay together"
    assert "↵\n(-" in told


def test_untrusted_text_is_neither_markup_nor_terminal_commands(polar: Polar, run: RunFolder) -> None:
    told = polar("show", session_id(run, 1)).output
    assert "\x1b" not in told
    assert "I never said that.\\u001b]0;owned\\u0007 [red]No[/red]." in told
    assert "Done: 42 [bold]✓[/bold]." in told


def test_without_the_model_tokens_are_ids(polar: Polar, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    Damage(run).ledger("UPDATE meta SET value = '/nowhere' WHERE name = 'model_path'")
    told = polar("show", session_id(run), "--tokens").output
    assert "tokens are shown as ids: expected tokenizer_config.json in the model directory /nowhere" in told
    assert "⟦" in told


def test_on_a_terminal_trained_tokens_have_a_colour_and_no_marks(
    polar: Polar, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    told = polar("show", session_id(run), "--tokens").output
    assert "\x1b[1;32mI look. <tool_call>" in told
    assert "⟦" not in told


def test_no_color_is_respected(polar: Polar, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    told = polar("show", session_id(run), "--tokens").output
    assert "⟦\x1b[1mI look. <tool_call>" in told
    assert "\x1b[1;32m" not in told


@pytest.mark.parametrize("character", ["\x1b", "\x9b", "\r", "\x7f", "\u202e", "\u2066", "\ufeff", "\ud800"])
def test_characters_that_do_something_are_spelled_out(character: str) -> None:
    assert visible(f"a{character}b\n\t") == f"a\\u{ord(character):04x}b\n\t"


def test_a_broken_character_stays_one_token_each(run: RunFolder, smollm2_dir: Path) -> None:
    renderer = load_renderer(smollm2_dir)
    trace = build(read_captured(run.capture, session_id(run)), builder="prefix_merging", status="completed", reward=1.0).traces[0]
    text = Writer(renderer.decode, logprobs=True).trace(trace).plain
    assert text.count("(-") + text.count(" -") >= len(trace.call_ids)
    assert "\ufffd" not in text


def test_what_was_not_served_is_told_of_a_session(run: RunFolder) -> None:
    calls = read_captured(run.capture, session_id(run)).calls
    first = calls[0]
    odd = structs.replace(first, kind="auxiliary", unserved=("effort", "image"), normalisers=("cache_control",))
    also = structs.replace(first, unserved=("effort",))
    assert asides([odd, also]) == [
        "not served: effort (2 calls), image (1 call)",
        "normalised: cache_control (1 call)",
        "kinds: auxiliary (1 call), agent (1 call)",
    ]
    assert asides(calls) == []
