"""Finding a harness, and checking its options."""

from pathlib import Path

import pytest

from polar import harnesses
from polar.errors import UsageError
from polar.specs import HarnessSpec

OWN = """
from polar.harnesses.shell import Shell
class Mine(Shell):
    name = "mine"
class Needy:
    def __init__(self, argument): ...
class Other: ...
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_harness.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def test_every_name_is_found_and_its_profile_agrees() -> None:
    assert (harnesses.names()[0], harnesses.names()[-1]) == ("pi", "shell"), "the default comes first, what is no agent last"
    assert len(set(harnesses.names())) == len(harnesses.names())
    for name in harnesses.names():
        harness = harnesses.get(name)
        assert harness.name == harness.profile.name == name
        assert harness.version == harness.profile.version
        assert harness.summary


def test_an_unknown_name_is_answered_with_those_that_exist() -> None:
    with pytest.raises(
        UsageError, match=r"no harness 'mini-swe-agent' \(did you mean 'mini_swe_agent'\?\).* pi, .*mini_swe_agent, .*shell"
    ):
        harnesses.get("mini-swe-agent")


def test_a_class_of_ones_own_is_imported() -> None:
    assert harnesses.get("own_harness:Mine").name == "mine"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Mine", "No module named.*PYTHONPATH"),
        ("own_harness:Missing", "no attribute 'Missing'"),
        ("own_harness:Needy", "needs no arguments"),
        ("own_harness:Other", "lacks name, version"),
        (":Mine", "module:Class"),
        ("own_harness:", "module:Class"),
    ],
)
def test_a_path_that_leads_to_no_harness_says_why(path: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        harnesses.get(path)


def test_options_that_do_not_exist_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="'pi' has no option 'thinking'; its options: `api`"):
        harnesses.get("pi").check(HarnessSpec("pi", {"thinking": "high"}))
    with pytest.raises(UsageError, match="'mini_swe_agent' has no option"):
        harnesses.get("mini_swe_agent").check(HarnessSpec("mini_swe_agent", {"x": ""}))
    with pytest.raises(UsageError, match=r"no option 'comand' \(did you mean 'command'\?\)"):
        harnesses.get("shell").check(HarnessSpec("shell", {"command": "true", "comand": "true"}))
    with pytest.raises(UsageError, match="needs the option 'command'"):
        harnesses.get("shell").check(HarnessSpec("shell", {"command": " "}))
    harnesses.get("shell").check(HarnessSpec("shell", {"command": "true"}))
