"""`polar audit`: the proof, and what breaks it, with the exit status that scripts go by."""

import re

import pytest

from polar.audit.claims import CLAIMS
from polar.rollout.folder import RunFolder
from tests.audit.damage import WORK, Damage
from tests.cli.conftest import Polar


def test_a_finished_run_is_proven(polar: Polar, run: RunFolder) -> None:
    told = polar("audit", run.path)
    assert told.exit_code == 0
    assert told.output.count("✓") == len(CLAIMS)
    assert "runs/one: proven" in told.output


def test_a_damaged_run_is_not(polar: Polar, run: RunFolder) -> None:
    Damage(run).call(WORK, 1, prompt_tokens=1)
    told = polar("audit", run.path)
    assert told.exit_code == 1
    assert "✗ 1 prompt_tokens" in told.output
    assert "ids, the prompt had 1" in told.output
    assert told.output.count("✓") == len(CLAIMS) - 1


def test_without_the_model_it_says_what_was_not_checked(polar: Polar, run: RunFolder) -> None:
    Damage(run).ledger("UPDATE meta SET value = '/nowhere' WHERE name = 'model_path'")
    told = polar("audit", run.path)
    assert told.exit_code == 0
    assert told.output.count("not checked") == 2
    assert told.output.count("✓") == len(CLAIMS) - 2
    assert "runs/one: proven, except T06, reply: no tokenizer ·" in told.output


def test_where_the_engine_rendered_it_says_so(polar: Polar, run: RunFolder) -> None:
    Damage(run).ledger("UPDATE meta SET value = 'chat' WHERE name = 'renderer'")
    told = polar("audit", run.path)
    assert told.exit_code == 0
    assert "runs/one: proven, except T06, reply: the engine rendered ·" in told.output


def test_what_a_gateway_captured_alone_is_proven_as_far_as_there_are_files(polar: Polar, run: RunFolder) -> None:
    run.ledger.unlink()
    told = polar("audit", run.path)
    assert told.exit_code == 0, told.output
    assert told.output.startswith("some claims cannot be checked: the run does not say where its model's tokenizer is")
    assert "proven, except T06, reply: no tokenizer; weights, ledger, frozen: no ledger ·" in told.output
    assert told.output.count("✓") == len(CLAIMS) - 5
    assert "= 0 trained + excluded" in told.output, "nobody gave a reward"
    Damage(run).ids(WORK, 0, lambda ids: ids.__setitem__(0, 7))
    told = polar("audit", run.path)
    assert told.exit_code == 1
    assert "prompt_hash: the path hashes to" in told.output


def test_only_what_is_proven_whole_is_green(polar: Polar, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32mruns/one: proven ·" in polar("audit", "runs/one").output
    Damage(run).ledger("UPDATE meta SET value = '/nowhere' WHERE name = 'model_path'")
    assert "\x1b[33mruns/one: proven, except" in polar("audit", "runs/one").output


def test_a_damaged_tree_leaves_no_tick_behind_what_it_hides(polar: Polar, run: RunFolder) -> None:
    Damage(run).node(WORK, 2, "parent", 4)
    told = polar("audit", run.path)
    assert told.exit_code == 1
    assert "✗ 1 tree" in told.output
    assert told.output.count("✓") == 3, "unreadable, frozen, sampling"
    assert told.output.count("not checked in 1 sessions") == len(CLAIMS) - 4
    assert "runs/one: 1 findings" in told.output


def test_rescoring_with_an_engine(polar: Polar, run: RunFolder, engine_url: str) -> None:
    told = polar("audit", run.path, "--rescore", engine_url)
    assert told.exit_code == 0, told.output
    assert "all 4 traces" in told.output
    assert "turn 3" in told.output
    assert re.search(r"not compared: \d+ tokens, excluded: aborted", told.output)


def test_what_cannot_be_proven_is_not_rescored(polar: Polar, run: RunFolder) -> None:
    Damage(run).call(WORK, 1, prompt_tokens=1)
    told = polar("audit", run.path, "--rescore", "http://127.0.0.1:9")
    assert told.exit_code == 1
    assert "not rescored" in told.output


def test_no_engine_to_rescore_with(polar: Polar, run: RunFolder) -> None:
    told = polar("audit", run.path, "--rescore", "http://127.0.0.1:9")
    assert told.exit_code == 1
    assert "no engine answers at http://127.0.0.1:9" in told.stderr
