"""The README's first task and its Python, run as they stand there: real Pi, a scripted policy in the place of your vLLM."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from polar.engines.launch import engine_process
from tests.test_docs import code_blocks

README = Path(__file__).parents[2] / "README.md"
POLICY = """
import json
from polar.engines.scripted import Scripted

FIZZ = "for n in range(1, 16): print('Fizz' if n % 3 == 0 else n)"

def reply(call):
    if "fizz.py" in call.prompt_text and call.turn == 0:
        write = {"name": "write", "arguments": {"path": "fizz.py", "content": FIZZ}}
        return Scripted("<tool_call>" + json.dumps(write) + "</tool_call>")
    return Scripted("Hello, it is done.")
"""


def block(language: str, containing: str) -> str:
    return next(text for kind, text in code_blocks(README.read_text()) if kind == language and containing in text)


async def run(*command: str, cwd: Path) -> str:
    """Run to the end; what it printed. Fails on another status than 0."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env={**os.environ, "PATH": path}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


async def test_the_readme_works_as_it_stands(smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy.py").write_text(POLICY)
    (tmp_path / "tasks.yaml").write_text(block("yaml", "fizz"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arguments = ["--model-dir", str(smollm2_dir), "--script", "policy:reply", "--log", str(tmp_path / "sampled.jsonl")]
    command = [sys.executable, "-m", "polar.engines.scripted", *arguments]
    async with engine_process(command, log=tmp_path / "engine.log") as engine:
        said = [await run(*line.replace("http://your-vllm:8000", engine.url).split(), cwd=tmp_path) for line in commands()]
        assert "1.00 (4)" in said[0]
        assert "proven" in said[2]
        assert (tmp_path / "runs" / "fizz" / "traces.parquet").exists()
        script = block("python", "from polar import").replace('harness="pi"', f'harness="pi", engine="{engine.url}", out="out"')
        (tmp_path / "hello.py").write_text(
            script + "\nassert done.pass_at_1 == 1.0, done\nassert len(done.trajectories()) == 4\n"
        )
        await run(sys.executable, "hello.py", cwd=tmp_path)


def commands() -> list[str]:
    return block("", "polar run tasks.yaml").strip().splitlines()
