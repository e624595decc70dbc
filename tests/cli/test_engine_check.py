"""`polar engine check`, and the options that say which models answer."""

import json
from pathlib import Path

import pytest

from polar.cli.serving import serving
from polar.errors import UsageError
from tests.cli.conftest import Polar, start

SPOILT = """
from tokenizers import Tokenizer
from pathlib import Path
import asyncio, sys
from polar.engines.scripted import Scripted, ScriptedEngine, scripted_server

async def main(directory):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    spoilt = lambda call: Scripted("ok", fault="usage_off_by_one")
    async with scripted_server(ScriptedEngine(tokenizer, spoilt, model_dir=directory, probe=spoilt)) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_sound_engine_gets_a_table_and_exit_status_0(engine_url: str, polar: Polar) -> None:
    told = polar("engine", "check", engine_url)
    assert told.exit_code == 0, told.output
    assert f"{engine_url}: it can be trained with" in told.output
    for code in ("T05", "T07", "T04", "T06", "T08", "L02", "L03", "L01", "W01", "C03"):
        assert code in told.output
    assert told.output.count("proven") == 10


def test_what_fails_is_named_with_what_to_do_and_exit_status_1(smollm2_dir: Path, home: Path, polar: Polar) -> None:
    server = start("-c", SPOILT, str(smollm2_dir), cwd=home)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    try:
        told = polar("engine", "check", url)
        assert told.exit_code == 1
        assert f"{url}: it is not served" in told.output
        assert "\nT08: the engine loses or invents tokens: update it" in told.output
        refused = polar("gateway", "--engine", url, "--out", "mine", "--port", "0")
        assert refused.exit_code == 2
        assert "fails its self-test: T08" in refused.stderr
    finally:
        server.terminate()
        server.wait()


def test_what_cannot_be_proven_is_checked_and_refused_where_it_would_be_trained(
    home: Path, engine_url: str, polar: Polar
) -> None:
    text_only = f"openai+{engine_url}/v1#scripted"
    told = polar("engine", "check", text_only)
    assert told.exit_code == 0, told.output
    assert "it is served with --accept-unproven" in told.output
    task = {"id": "t", "instruction": "i", "harness": {"name": "shell", "options": {"command": "true"}}}
    (home / "one.jsonl").write_text(json.dumps(task))
    refused = polar("run", "one.jsonl", "--engine", text_only)
    assert refused.exit_code == 2
    assert "or take it as it is with --accept-unproven" in refused.stderr
    accepted = polar("run", "one.jsonl", "--engine", text_only, "--accept-unproven", "--sandbox", "process")
    assert "without a model call" in accepted.stderr  # it was served: what failed is the harness


def test_routes_are_read_by_name() -> None:
    options = serving("embedded", "", "none", ["big=openai+https://host/v1#m", "small=http://a:1"], True)
    assert options.routes == {"big": "openai+https://host/v1#m", "small": "http://a:1"}
    assert (options.renderer, options.accept_unproven) == ("none", True)


@pytest.mark.parametrize(
    ("routes", "said"),
    [(["big"], "expected NAME=URL, got 'big'"), (["=http://a:1"], "expected NAME=URL"), (["a=b", "a=c"], "has two routes")],
)
def test_what_is_no_route_is_refused(routes: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        serving("embedded", "", "auto", routes, False)
