"""The gateways under test as processes: ours, and peers at pinned versions, each in a virtual environment of its own.

All stand before the same engine, listen on loopback, and run as one worker. The peers pass text on: the engine renders.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.load import Address, LoadError, ask, fetch
from benchmarks.ours import CHAT_MODE, TOKEN_IN
from polar.paths import cache_dir

ROOT = Path(__file__).parent.parent
RLLM = "rllm-model-gateway==0.1.0"
LITELLM = "litellm[proxy]==1.108.4"  # the newest whose requirements can all be had from PyPI
START_SECONDS = 120.0
START_EVERY = 0.1


class NotInstalled(Exception):
    """A peer that is not there; the message stands in its row."""


@dataclass(frozen=True)
class Engine:
    """The stub: its port on loopback, and the directory of the model that it claims to serve."""

    port: int
    model_dir: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Gateway:
    """A gateway that listens.

    Attributes:
        key: opens Polar's sessions; "" for a peer.
        renders: the engine gets ids.
        prefix: what the path of session number N begins with, `{}` standing for N.
    """

    name: str
    port: int
    process: psutil.Process
    prefix: str = ""
    key: str = ""
    renders: bool = False

    async def sessions(self, count: int) -> list[Address]:
        """Where `count` conversations send their requests."""
        if not self.key:
            return [Address(self.port, self.prefix.format(number)) for number in range(count)]
        return [Address(self.port, await self._open()) for _ in range(count)]

    async def _open(self) -> str:
        head = f"POST /sessions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {self.key}\r\ncontent-length: 0\r\n\r\n"
        return "/s/" + str((await ask(self.port, head.encode()))["key"])

    def cpu(self) -> float:
        """Seconds that the process and its children have used."""
        return sum(sum(process.cpu_times()[:2]) for process in self._tree())

    def memory(self) -> int:
        """Resident bytes of the process and its children."""
        return sum(process.memory_info().rss for process in self._tree())

    def _tree(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


# --- installation -----------------------------------------------------------------------------------------------------


def environment(requirement: str) -> Path:
    """Where a peer's virtual environment is, or will be."""
    return cache_dir() / "bench" / requirement.replace("[proxy]", "").replace("==", "-")


def install(requirement: str) -> Path:
    """The `bin` directory of a peer's environment, which is made if it is not there.

    Raises:
        NotInstalled: it cannot be; pip has said why.
    """
    target = environment(requirement)
    if not (target / ".ready").exists():
        print(f"Installing {requirement} into {target} (once)", flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        for tool, *arguments in (["venv.sh", str(target)], ["pip.sh", str(target), requirement]):
            if subprocess.run([ROOT / "tools" / tool, *arguments]).returncode:
                raise NotInstalled("not installed: see above")
        (target / ".ready").touch()
    return target / "bin"


def install_all() -> None:
    """Install the peers that are Python packages, and say whether nginx is there.

    Raises:
        NotInstalled: one cannot be.
    """
    for requirement in (RLLM, LITELLM):
        print(f"{requirement}: {install(requirement)}")
    print(f"nginx: {_nginx_program() or 'not installed; Debian, Ubuntu: apt-get install nginx-light'}")


def _nginx_program() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


# --- processes --------------------------------------------------------------------------------------------------------


def ours(engine: Engine, scratch: Path) -> AbstractAsyncContextManager[Gateway]:
    """Polar's gateway in chat mode: the engine renders, as for the peers."""
    return _ours("polar", CHAT_MODE, engine, scratch)


def ours_token_in(engine: Engine, scratch: Path) -> AbstractAsyncContextManager[Gateway]:
    """Polar's gateway token-in: it renders, and the engine gets ids."""
    return _ours("token-in", TOKEN_IN, engine, scratch)


@contextlib.asynccontextmanager
async def _ours(name: str, mode: str, engine: Engine, scratch: Path) -> AsyncIterator[Gateway]:
    """With a fresh capture file."""
    key = secrets.token_hex()
    capture = scratch / f"{name}.db"
    command = [sys.executable, "-m", "benchmarks.ours", mode, engine.url, str(engine.model_dir), str(capture), key]
    with child(command) as process:
        port = await first_line(process)
        yield Gateway(name, int(port), psutil.Process(process.pid), key=key, renders=mode == TOKEN_IN)


@contextlib.asynccontextmanager
async def rllm(engine: Engine, scratch: Path) -> AsyncIterator[Gateway]:
    """rLLM's gateway, which captures what the engine says into SQLite."""
    port = free_port()
    command = [str(install(RLLM) / "rllm-model-gateway"), "--port", str(port), "--worker", engine.url, "--host", "127.0.0.1"]
    command += ["--store", "sqlite", "--db-path", str(scratch / "rllm.db"), "--log-level", "error"]
    async with _listening("rllm", command, port, "/health", scratch) as process:
        yield Gateway("rllm", port, process, "/sessions/{}")


@contextlib.asynccontextmanager
async def litellm(engine: Engine, scratch: Path) -> AsyncIterator[Gateway]:
    """LiteLLM's proxy, without keys and without a database."""
    port = free_port()
    config = scratch / "litellm.yaml"
    config.write_text(
        f"model_list:\n- model_name: policy\n  litellm_params:\n    model: openai/policy\n"
        f"    api_base: {engine.url}/v1\n    api_key: none\nlitellm_settings:\n  telemetry: false\n  request_timeout: 600\n"
    )
    command = [str(install(LITELLM) / "litellm"), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    async with _listening("litellm", command, port, "/health/liveliness", scratch) as process:
        yield Gateway("litellm", port, process)


@contextlib.asynccontextmanager
async def nginx(engine: Engine, scratch: Path) -> AsyncIterator[Gateway]:
    """nginx as plain proxy: what passing bytes on costs at least.

    Raises:
        NotInstalled: it is no Python package.
    """
    if (program := _nginx_program()) is None:
        raise NotInstalled("not installed")
    port = free_port()
    config = scratch / "nginx.conf"
    config.write_text(_NGINX.format(scratch=scratch, port=port, upstream=engine.url.removeprefix("http://")))
    command = [program, "-p", str(scratch), "-c", str(config), "-e", "stderr"]
    async with _listening("nginx", command, port, "/", scratch) as process:
        yield Gateway("nginx", port, process)


_NGINX = """
daemon off;
worker_processes 1;
pid {scratch}/nginx.pid;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  keepalive_requests 1000000;
  client_max_body_size 64m;
  client_body_buffer_size 1m;
  client_body_temp_path {scratch}/body;
  proxy_temp_path {scratch}/proxy;
  fastcgi_temp_path {scratch}/fastcgi;
  uwsgi_temp_path {scratch}/uwsgi;
  scgi_temp_path {scratch}/scgi;
  upstream engine {{ server {upstream}; keepalive 1024; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""

Starter = Callable[[Engine, Path], AbstractAsyncContextManager[Gateway]]
STARTERS: dict[str, Starter] = {"polar": ours, "token-in": ours_token_in, "rllm": rllm, "litellm": litellm, "nginx": nginx}


@contextlib.contextmanager
def child(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that says something on its standard output and ends with the block."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def first_line(process: subprocess.Popen[str]) -> str:
    """What a `child` prints when it is ready.

    Raises:
        RuntimeError: it ended instead.
    """
    assert process.stdout is not None
    if line := (await asyncio.to_thread(process.stdout.readline)).strip():
        return line
    raise RuntimeError(f"{process.args!r} ended before it was ready: see above")


@contextlib.asynccontextmanager
async def _listening(name: str, command: list[str], port: int, path: str, scratch: Path) -> AsyncIterator[psutil.Process]:
    """A peer's process once it answers; its output goes to a file, which is shown if it does not start."""
    log = scratch / f"{name}.log"
    with _logged(command, log) as process:
        for _ in range(int(START_SECONDS / START_EVERY)):
            if process.poll() is not None or await _answers(port, path):
                break
            await asyncio.sleep(START_EVERY)
        if process.poll() is not None:
            raise RuntimeError(f"{name} ended before it answered: {_end_of(log)}")
        yield psutil.Process(process.pid)


_SETTINGS = {
    "NO_PROXY": "127.0.0.1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # on loopback, and it costs least
}


@contextlib.contextmanager
def _logged(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | _SETTINGS, cwd=log.parent)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _answers(port: int, path: str) -> bool:
    try:
        await fetch(port, f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    except (OSError, LoadError):
        return False
    return True


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
