"""`polar gateway`: what it prints is all that a stranger needs."""

import json
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cli.conftest import start_polar


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_its_curl_lines_open_a_session_and_take_its_traces(home: Path, engine_url: str, stop: signal.Signals) -> None:
    serving = start_polar("gateway", "--engine", engine_url, "--out", "mine", "--port", "0", cwd=home)
    assert serving.stdout is not None
    lines = [serving.stdout.readline() for _ in range(7)]
    url = next(line.split()[-1] for line in lines if line.startswith("polar gateway ready on http://127.0.0.1:"))
    key = next(line.strip().split("=")[1] for line in lines if line.startswith("export POLAR_CONTROL_KEY="))
    opening, closing, taking = (line.split(":  ", 1)[1] for line in lines if "curl" in line)

    session = run_curl(opening, key)
    client = openai.OpenAI(base_url=f"{session['base_url']}/v1", api_key="any")
    reply = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "What is six times seven?"}])
    assert reply.choices[0].message.content
    assert session["base_url"].startswith(url)
    assert session["base_urls"] == {
        "openai": f"{session['base_url']}/v1",
        "anthropic": session["base_url"],
        "gemini": session["base_url"],
    }
    assert run_curl(closing.replace("SESSION_ID", session["session_id"]), key)["calls"] == 1
    assert len(run_curl(taking.replace("SESSION_ID", session["session_id"]), key)["traces"]) == 1

    serving.send_signal(stop)
    serving.communicate(timeout=10)
    assert serving.returncode == 0


def test_a_given_key_is_used_and_not_printed(home: Path, engine_url: str) -> None:
    serving = start_polar("gateway", "--engine", engine_url, "--out", "mine", "--port", "0", cwd=home, POLAR_CONTROL_KEY="mine")
    assert serving.stdout is not None
    lines = [serving.stdout.readline() for _ in range(6)]
    assert not any("export" in line for line in lines)
    opening = next(line.split(":  ", 1)[1] for line in lines if "curl" in line)
    assert run_curl(opening, "wrong")["error"]["message"] == "the control key is missing or wrong"
    assert "key" in run_curl(opening, "mine")
    serving.terminate()
    serving.communicate(timeout=10)


def run_curl(line: str, key: str) -> Any:
    command = shlex.split(line.replace("$POLAR_CONTROL_KEY", key))
    return json.loads(subprocess.run([*command, "-sS"], capture_output=True, check=True).stdout)
