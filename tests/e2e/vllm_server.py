"""The real vLLM on CPU, as a process of the tests."""

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READY_SECONDS = 300
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}


@contextmanager
def vllm_server(model: Path, log: Path, *flags: str) -> Iterator[str]:
    """URL of a vLLM with `model` in float32, ended with the block."""
    python = os.environ.get("POLAR_VLLM_PYTHON")
    assert python, "POLAR_VLLM_PYTHON names no Python with vLLM; `make test-all` installs one"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "policy"),
        *("--dtype", "float32", "--enforce-eager", "--enable-scale-out", "--host", "127.0.0.1", "--port", str(port), *flags),
    ]
    with log.open("wb") as output:
        server = subprocess.Popen(command, env={**os.environ, **QUIET}, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def _wait_until_ready(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(READY_SECONDS):
        assert server.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text(errors="replace")[-3000:])
