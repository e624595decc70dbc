"""The scripted session by which each harness is checked."""

import subprocess
from pathlib import Path

import msgspec
import pytest

from polar import harnesses
from polar.harnesses.protocol import shell_probe
from polar.rollout.check import FILES

PROBED = [name for name in harnesses.names() if harnesses.get(name).probe]


def test_a_shell_probe_writes_the_files_as_they_must_be(tmp_path: Path) -> None:
    first, both, answer = shell_probe("bash", "line", timeout=9)
    assert [len(turn.calls) for turn in (first, both, answer)] == [1, 2, 0]
    for name, arguments in (*first.calls, *both.calls):
        assert (name, sorted(arguments)) == ("bash", ["line", "timeout"])
        subprocess.run(["/bin/sh", "-c", str(arguments["line"])], cwd=tmp_path, check=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == FILES


@pytest.mark.parametrize("name", PROBED)
def test_every_probe_writes_every_file_in_words_that_json_can_hold(name: str) -> None:
    written = msgspec.json.encode(harnesses.get(name).probe).decode()
    assert all(file in written for file in FILES)
