"""The scripted engine: says what it is told to, in vLLM's words, and logs the truth."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from polar.engines.scripted import Logged, Scripted, ScriptedCall, ScriptedEngine, read_log, scripted_server

TEXT = 'I will list the files.\n<tool_call>{"name": "bash", "arguments": {"command": "ls -la"}}</tool_call> Größe 😀'


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def prompt(tokenizer: Tokenizer, *turns: str) -> list[int]:
    """A ChatML prompt: user turns and assistant turns by turns, open for the next assistant turn."""
    roles = ["user", "assistant"] * len(turns)
    text = "".join(f"<|im_start|>{role}\n{turn}<|im_end|>\n" for role, turn in zip(roles, turns, strict=False))
    return encode(tokenizer, text + "<|im_start|>assistant\n")


def body(ids: list[int], request_id: str = "r1", max_tokens: int = 1000, stream: bool = True) -> dict[str, Any]:
    sampling = {"max_tokens": max_tokens, "logprobs": 0}
    return {"request_id": request_id, "token_ids": ids, "sampling_params": sampling, "stream": stream}


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield msgspec.json.decode(line[6:])


async def choices(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    return [choice async for event in events(response) for choice in event["choices"]]


def sampled(choices: list[dict[str, Any]]) -> list[int]:
    return [token for choice in choices for token in choice["token_ids"]]


@asynccontextmanager
async def serving(engine: ScriptedEngine) -> AsyncIterator[aiohttp.ClientSession]:
    async with scripted_server(engine) as url, aiohttp.ClientSession(url) as client:
        yield client


async def freed(entry: Logged) -> None:
    async with asyncio.timeout(2):
        while entry.freed_at is None:
            await asyncio.sleep(0.005)


async def test_the_text_is_sampled_in_pieces_that_no_tokenizer_would_choose(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT))
    async with serving(engine) as client:
        for request_id in ("r1", "r2"):
            async with client.post("/inference/v1/generate", json=body(prompt(tokenizer, "hi"), request_id)) as response:
                ids = sampled(await choices(response))
            assert tokenizer.decode(ids[:-1], skip_special_tokens=False) == TEXT
            assert ids[-1] == tokenizer.token_to_id("<|im_end|>")
            assert ids[:-1] != encode(tokenizer, TEXT)
    first, second = engine.log
    assert first.ids != second.ids


async def test_even_a_short_text_is_not_canonical_and_a_request_id_says_which_pieces(tokenizer: Tokenizer) -> None:
    async def pieces() -> list[int]:
        engine = ScriptedEngine(tokenizer, lambda call: Scripted("ok"))
        async with serving(engine) as client, client.post("/inference/v1/generate", json=body([5])) as response:
            return sampled(await choices(response))

    assert await pieces() == await pieces() == [*(encode(tokenizer, letter)[0] for letter in "ok"), 2]


async def test_the_log_is_what_went_over_the_wire(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT, tokens_per_chunk=3), log_file=tmp_path / "log.jsonl")
    ids = prompt(tokenizer, "hi")
    async with serving(engine) as client, client.post("/inference/v1/generate", json=body(ids)) as response:
        wire = await choices(response)
    [entry] = engine.log
    assert (entry.request_id, list(entry.prompt_ids), entry.finish) == ("r1", ids, "stop")
    assert entry.ids == sampled(wire)
    assert entry.logprobs == [token["logprob"] for choice in wire for token in choice["logprobs"]["content"]]
    assert all(value < 0 and np.float32(value) == value for value in entry.logprobs)
    assert entry.aborted_at is None
    assert read_log(tmp_path / "log.jsonl") == engine.log


async def test_the_stream_is_vllms(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, lambda call: Scripted("ab"))
    async with serving(engine) as client, client.post("/inference/v1/generate", json=body([5, 6])) as response:
        lines = [line for line in (await response.read()).split(b"\n\n") if line]
    assert lines[-1] == b"data: [DONE]"
    *chunks, usage = [msgspec.json.decode(line[6:]) for line in lines[:-1]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [1, 1, 1]
    assert chunks[-1]["choices"][0]["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
    assert chunks[0]["request_id"] == "generate-tokens-r1"
    assert usage["usage"] == {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3}
    assert usage["choices"] == []


async def test_a_whole_reply_is_the_same_in_one_piece(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT))
    async with (
        serving(engine) as client,
        client.post("/inference/v1/generate", json=body([5], stream=False)) as whole,
        client.post("/inference/v1/generate", json=body([5])) as stream,
    ):
        [choice] = (await whole.json())["choices"]
        assert choice["token_ids"] == sampled(await choices(stream))
        assert choice["finish_reason"] == "stop"


async def test_max_tokens_cuts_with_finish_length(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT))
    async with serving(engine) as client, client.post("/inference/v1/generate", json=body([5], max_tokens=4)) as response:
        wire = await choices(response)
    assert (len(sampled(wire)), wire[-1]["finish_reason"], engine.log[0].finish) == (4, "length", "length")


async def test_a_script_may_end_with_length_and_without_the_end_of_turn(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT, finish="length"))
    async with serving(engine) as client, client.post("/inference/v1/generate", json=body([5])) as response:
        wire = await choices(response)
    assert tokenizer.decode(sampled(wire), skip_special_tokens=False) == TEXT
    assert wire[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(("turns", "expected"), [(("hi",), 0), (("hi", "yes", "go"), 1), (("a", "b", "c", "d", "e"), 2)])
async def test_the_script_knows_its_turn_and_reads_the_prompt(
    tokenizer: Tokenizer, turns: tuple[str, ...], expected: int
) -> None:
    calls: list[ScriptedCall] = []

    def reply(call: ScriptedCall) -> Scripted:
        calls.append(call)
        return Scripted("ok")

    ids = prompt(tokenizer, *turns)
    async with serving(ScriptedEngine(tokenizer, reply)) as client:
        await client.post("/inference/v1/generate", json=body(ids))
    assert calls == [ScriptedCall("r1", tuple(ids), tokenizer.decode(ids, skip_special_tokens=False), expected)]


async def test_abort_needs_vllms_prefix_and_keeps_what_was_sampled(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT, hold_before_end=asyncio.Event()))
    async with serving(engine) as client, client.post("/inference/v1/generate", json=body([5])) as response:
        await response.content.readline()
        await client.post("/inference/v1/abort_requests", json={"request_ids": ["r1"]})
        assert [entry.aborted_at for entry in engine.log] == [None]
        await client.post("/inference/v1/abort_requests", json={"request_ids": ["generate-tokens-r1"]})
        wire = await choices(response)
    assert (wire[-1]["finish_reason"], wire[-1]["token_ids"]) == ("abort", [])
    assert engine.log[0].aborted_at is not None
    assert engine.log[0].finish == "abort"


async def test_a_hung_up_client_stops_the_generation_at_once(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT * 10, delay_per_token=0.01))
    async with serving(engine) as client:
        async with client.post("/inference/v1/generate", json=body([5])) as response:
            await response.content.readline()
            hung_up = time.time()
        await freed(engine.log[0])
    assert engine.log[0].aborted_at is not None
    assert engine.log[0].aborted_at - hung_up < 1.0
    assert len(engine.log[0].ids) < 100


async def test_a_test_can_stop_between_the_last_token_and_the_finish_chunk(tokenizer: Tokenizer) -> None:
    end = asyncio.Event()
    engine = ScriptedEngine(tokenizer, lambda call: Scripted("ab", hold_before_end=end))
    async with serving(engine) as client, client.post("/inference/v1/generate", json=body([5])) as response:
        stream = events(response)
        seen = [(await anext(stream))["choices"][0] for _ in range(3)]
        assert sampled(seen)[-1] == tokenizer.token_to_id("<|im_end|>")
        assert engine.log[0].freed_at is None
        end.set()
        last = (await anext(stream))["choices"][0]
    assert (last["token_ids"], last["finish_reason"]) == ([], "stop")


async def test_a_pause_freezes_and_an_update_in_mid_generation_keeps_both_versions(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, lambda call: Scripted(TEXT, delay_per_token=0.002))
    async with serving(engine) as client, client.post("/inference/v1/generate", json=body([5])) as response:
        await response.content.readline()
        await client.post("/pause?mode=keep")
        await asyncio.sleep(0.02)
        before = len(engine.log[0].ids)
        await asyncio.sleep(0.05)
        assert len(engine.log[0].ids) == before
        assert (await (await client.get("/is_paused")).json()) == {"is_paused": True}
        await client.post("/update_weight_version", json={"new_version": "v7"})
        await client.post("/resume")
        wire = await choices(response)
    total = len(engine.log[0].ids)
    assert wire[-1]["weight_versions"] == [
        {"version": "default", "start": 0, "end": before},
        {"version": "v7", "start": before, "end": total},
    ]
    assert engine.log[0].versions == ["default"] * before + ["v7"] * (total - before)


async def test_controls_are_recorded(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, lambda call: Scripted("ok"))
    async with serving(engine) as client:
        await client.post("/pause?mode=keep")
        await client.post("/collective_rpc", json={"method": "reload_weights"})
        assert (await client.get("/health")).status == 200
    assert [(control.path, control.body) for control in engine.controls] == [
        ("/pause?mode=keep", ""),
        ("/collective_rpc", '{"method": "reload_weights"}'),
    ]


async def test_a_prompt_beyond_the_context_is_refused_as_vllm_does(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, lambda call: Scripted("ok"), max_model_len=4)
    async with serving(engine) as client, client.post("/inference/v1/generate", json=body([5] * 4)) as response:
        assert response.status == 400
        assert "maximum context length is 4 tokens" in (await response.json())["error"]["message"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "myscript.py").write_text(
        "from polar.engines.scripted import Scripted, ScriptedCall\n\n"
        "def reply(call: ScriptedCall) -> Scripted:\n"
        "    return Scripted(f'turn {call.turn}')\n"
    )
    monkeypatch.chdir(tmp_path)
    return "myscript:reply"


async def test_as_a_process_it_says_where_it_listens_and_its_log_outlives_it(
    script: str, smollm2_dir: Path, tmp_path: Path
) -> None:
    directory, log = smollm2_dir, tmp_path / "log.jsonl"
    options: tuple[str | Path, ...] = ("--model-dir", directory, "--script", script, "--log", log)
    command = (sys.executable, "-m", "polar.engines.scripted", *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    ready = (await process.stdout.readline()).decode()
    url = ready.removeprefix("polar engine ready on ").split()[0]
    async with aiohttp.ClientSession(url) as client:
        assert (await (await client.get("/v1/models")).json())["data"][0]["root"] == str(directory)
        async with client.post("/inference/v1/generate", json=body([5])) as response:
            ids = sampled(await choices(response))
    process.terminate()
    assert await process.wait() == 0
    assert [entry.ids for entry in read_log(log)] == [ids]
