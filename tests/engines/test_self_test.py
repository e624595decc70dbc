"""The self-test: what an engine proves, and each fault that it finds."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from polar.chat import Message, Tool, Usage
from polar.engines import proofs, self_test
from polar.engines.proofs import Proof, Sampled, SelfTest
from polar.engines.protocol import EngineInfo, Generated, ResolvedSampling
from polar.engines.renderers import load_renderer
from polar.engines.script import Fault, prove
from polar.engines.scripted import Scripted, ScriptedCall, ScriptedEngine, scripted_server
from polar.engines.vllm import VllmEngine
from polar.errors import EngineError
from polar.specs import Float32Array, Int32Array
from polar.tokens.rendering import LastTurn, Renderer

pytestmark = pytest.mark.heavy  # a quarter of a minute that `make test` does not have

PROVEN = ["T05", "T07", "T04", "T06", "T08", "L02", "L03", "L01", "W01", "C03"]


def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def renderer(smollm2_dir: Path) -> Renderer:
    return load_renderer(smollm2_dir)


@asynccontextmanager
async def serving(
    directory: Path,
    probe: Callable[[ScriptedCall], Scripted] = prove,
    *,
    vocabulary: Tokenizer | None = None,
    client: type[VllmEngine] = VllmEngine,
) -> AsyncIterator[VllmEngine]:
    """A scripted engine that answers the self-test by `probe`."""
    engine = ScriptedEngine(vocabulary or tokenizer(directory), lambda call: Scripted("no"), model_dir=directory, probe=probe)
    async with scripted_server(engine) as url:
        asked = client(url)
        yield asked
        await asked.close()
    assert engine.log == []  # what the self-test asks is none of the script's calls


async def proved(engine: VllmEngine, renderer: Renderer | None) -> SelfTest:
    return await self_test.self_test(engine, await engine.info(), renderer)


def broken(test: SelfTest) -> list[str]:
    assert all(proof.advice for proof in test.of("failed"))
    return [proof.code for proof in test.of("failed")]


async def test_the_scripted_engine_proves_everything(smollm2_dir: Path, renderer: Renderer) -> None:
    async with serving(smollm2_dir) as engine:
        assert [proof.code for proof in (await proved(engine, renderer)).of("proven")] == PROVEN


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("missing_logprob", "T08"),
        ("usage_off_by_one", "T08"),
        ("nan_logprob", "L02"),
        ("sentinel_logprob", "L02"),
        ("version_gap", "W01"),
        ("die", "T08"),
        ("http_500", "T08"),
    ],
)
async def test_each_fault_of_a_reply_is_found(smollm2_dir: Path, renderer: Renderer, fault: Fault, code: str) -> None:
    async with serving(smollm2_dir, lambda call: Scripted("ok", fault=fault)) as engine:
        assert code in broken(await proved(engine, renderer))


async def test_a_tokenizer_that_adds_two_bos_is_found(smollm2_dir: Path, renderer: Renderer) -> None:
    doubled = tokenizer(smollm2_dir)
    doubled.post_processor = TemplateProcessing(
        single="<|endoftext|> <|endoftext|> $A", special_tokens=[("<|endoftext|>", doubled.token_to_id("<|endoftext|>"))]
    )
    async with serving(smollm2_dir, vocabulary=doubled) as engine:
        assert broken(await proved(engine, renderer)) == ["T05"]


async def test_one_bos_that_the_tokenizer_adds_is_none_too_many(smollm2_dir: Path, renderer: Renderer) -> None:
    single = tokenizer(smollm2_dir)
    single.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", single.token_to_id("<|endoftext|>"))]
    )
    async with serving(smollm2_dir, vocabulary=single) as engine:
        assert broken(await proved(engine, renderer)) == []


@pytest.mark.parametrize(("one", "other"), [("a", "e"), ("<|im_end|>", "<|im_start|>")])
async def test_another_models_vocabulary_is_found(smollm2_dir: Path, renderer: Renderer, one: str, other: str) -> None:
    files = json.loads((smollm2_dir / "tokenizer.json").read_text())
    vocabulary = files["model"]["vocab"]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    for token in files["added_tokens"]:
        token["id"] = vocabulary[token["content"]]
    files["added_tokens"].sort(key=lambda token: token["id"])
    async with serving(smollm2_dir, vocabulary=Tokenizer.from_str(json.dumps(files))) as engine:
        assert "T07" in broken(await proved(engine, renderer))


class Deaf(VllmEngine):
    """Goes on to the end, whatever is aborted."""

    async def abort(self, request_id: str) -> None:
        return


class Unstopped(VllmEngine):
    """Drops the id that stopped a reply, as some servers do, and its log-probability."""

    async def generate(
        self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Generated, None]:
        async for piece in super().generate(request_id, prompt_ids, sampling):
            usage = piece.usage and Usage(piece.usage.prompt_tokens, piece.usage.completion_tokens - 1)
            last = piece.finish == "stop"
            versions = tuple(msgspec.structs.replace(span, end=span.end - 1) for span in piece.versions)
            trimmed = msgspec.structs.replace(
                piece, ids=piece.ids[:-1], logprobs=piece.logprobs[:-1], usage=usage, versions=versions
            )
            yield trimmed if last else piece


class Begun(VllmEngine):
    """Adds a token in front of every prompt."""

    async def generate(
        self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Generated, None]:
        longer = np.concatenate([prompt_ids[:1], prompt_ids])
        async for piece in super().generate(request_id, longer, sampling):
            yield piece


class Shifted(VllmEngine):
    """Tells of each token the log-probability of another."""

    async def score(self, ids: Int32Array) -> Float32Array:
        return np.roll(await super().score(ids), 1)


@pytest.mark.parametrize(("client", "codes"), [(Deaf, ["C03"]), (Unstopped, ["T06"]), (Shifted, ["L03", "L01"])])
async def test_a_server_with_a_habit_is_found(
    smollm2_dir: Path, renderer: Renderer, client: type[VllmEngine], codes: list[str]
) -> None:
    async with serving(smollm2_dir, client=client) as engine:
        assert broken(await proved(engine, renderer)) == codes


async def test_a_bos_that_the_server_adds_to_ids_is_found(smollm2_dir: Path, renderer: Renderer) -> None:
    async with serving(smollm2_dir, client=Begun) as engine:
        assert broken(await proved(engine, renderer))[0] == "T05"


class Processed(VllmEngine):
    """Serves a model whose logits are the scripted values, with vLLM's `--logprobs-mode processed_logprobs`."""

    async def generate(
        self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Generated, None]:
        async for piece in super().generate(request_id, prompt_ids, sampling):
            heat = sampling.temperature or 1.0
            flattened = tuple(value / heat - (0.0 if heat == 1.0 else 3.0) for value in piece.logprobs)
            yield msgspec.structs.replace(piece, logprobs=flattened)


async def test_processed_log_probabilities_are_found_out_and_noted_on_the_engine(smollm2_dir: Path, renderer: Renderer) -> None:
    async with serving(smollm2_dir, lambda call: prove_at_length(call), client=Processed) as engine:
        test = await proved(engine, renderer)
        assert broken(test) == []
        assert (test.logprobs_mode, engine.logprobs_mode) == ("processed", "processed")


def prove_at_length(call: ScriptedCall) -> Scripted:
    return prove(call) if "abort" in call.request_id else Scripted("several words that are cut anyhow")


class Mute(VllmEngine):
    """Neither scores nor tokenizes."""

    async def info(self) -> EngineInfo:
        return msgspec.structs.replace(await super().info(), scores=False)

    async def tokenize(self, text: str) -> Int32Array:
        raise EngineError("no such route")


async def test_what_an_engine_cannot_show_is_unproven(smollm2_dir: Path, renderer: Renderer) -> None:
    async with serving(smollm2_dir, client=Mute) as engine:
        engine.logprobs_mode = "processed"
        test = await proved(engine, renderer)
        assert [proof.code for proof in test.doubts] == ["T05", "T07", "L03", "L01"]
        assert engine.logprobs_mode == "processed"  # as it was said
        assert "4 unproven (T05: the engine does not tokenize; " in test.line


async def test_an_engine_that_shows_text_only_has_one_thing_to_prove_and_cannot(smollm2_dir: Path) -> None:
    async with serving(smollm2_dir) as engine:
        info = msgspec.structs.replace(await engine.info(), shows_ids=False)
        test = await self_test.self_test(engine, info, None)
    assert [(proof.code, proof.verdict) for proof in test.proofs] == [("T08", "unproven")]
    assert test.doubts


async def test_a_paused_engine_is_waited_for_only_so_long(
    smollm2_dir: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "SECONDS", 0.2)
    async with serving(smollm2_dir) as engine:
        await engine.pause()
        with pytest.raises(EngineError, match="is it paused"):
            await proved(engine, renderer)


async def test_a_dead_engine_has_failed_nothing(smollm2_dir: Path, renderer: Renderer) -> None:
    engine = VllmEngine("http://127.0.0.1:9")
    with pytest.raises(EngineError, match="no engine answers"):
        await self_test.self_test(engine, EngineInfo("m", "", 1000), renderer)
    await engine.close()


async def test_in_chat_mode_the_engine_proves_what_it_renders(smollm2_dir: Path) -> None:
    async with serving(smollm2_dir) as engine:
        test = await proved(engine, None)
    assert broken(test) == []
    assert {"T05", "T06", "T08", "L02", "L03", "L01", "W01", "C03"} <= {proof.code for proof in test.of("proven")}
    (drift,) = (proof for proof in test.proofs if proof.code == "T01")
    assert (drift.verdict, test.doubts) == ("unproven", ())  # "ok", sampled as two letters, is rendered as one token
    assert "such histories fork" in drift.detail


GLUE = np.array([28, 28], np.int32)


class Glued:
    """A renderer whose prompts end with an empty thought, which a history drops (T04)."""

    def __init__(self, renderer: Renderer) -> None:
        self.name, self.stop_ids, self.shows_tools = "glued", renderer.stop_ids, renderer.shows_tools
        self.parser, self.decode = renderer.parser, renderer.decode
        self._renderer = renderer

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        return np.concatenate([self._renderer.render(messages, tools), GLUE])

    def bridge(self, last: LastTurn, messages: Sequence[Message]) -> Int32Array:
        return np.concatenate([self._renderer.bridge(last, messages), GLUE])


class Forgetful(Glued):
    """A renderer whose bridges lose what came after the reply."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        return self._renderer.render(messages, tools)

    def bridge(self, last: LastTurn, messages: Sequence[Message]) -> Int32Array:
        return self._renderer.bridge(last, messages[1:])


async def test_a_history_that_drops_what_a_prompt_ended_with_is_named_and_served(smollm2_dir: Path, renderer: Renderer) -> None:
    async with serving(smollm2_dir) as engine:
        test = await proved(engine, Glued(renderer))
    (glue,) = test.of("unproven")
    assert (glue.code, test.doubts, broken(test)) == ("T04", (), [])
    assert "leaves the earlier prompt" in glue.detail


async def test_a_bridge_that_renders_otherwise_than_a_history_is_found(smollm2_dir: Path, renderer: Renderer) -> None:
    async with serving(smollm2_dir) as engine:
        assert broken(await proved(engine, Forgetful(renderer))) == ["T04"]


def reply(logprobs: Sequence[float], scores: Sequence[float] | None = None) -> Sampled:
    count = len(logprobs)
    return Sampled(
        np.array([1, 2], np.int32),
        np.arange(count, dtype=np.int32),
        np.array(logprobs, np.float32),
        "length",
        (),
        Usage(2, count),
        None,
        None if scores is None else np.array(scores, np.float32),
    )


RAW = [-0.1, -3.0, -8.0, -5.5, -12.0, -1.0]


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (RAW, "raw"),
        ([value - 0.1 for value in RAW], "raw"),  # bfloat16
        ([value / 2 - 3.0 - (value < -6) for value in RAW], "processed"),
        ([-value for value in range(6)], None),
    ],
)
def test_the_nearer_description_of_log_probabilities_is_theirs(told: list[float], found: str | None) -> None:
    proof, mode = proofs.mode(reply(told, RAW), 2.0)
    assert mode == found
    assert proof.verdict == ("proven" if found else "failed")


def test_of_a_flat_model_the_mode_is_found_too() -> None:
    flat = [-10.0 + 0.05 * (place % 3) for place in range(6)]  # random weights: all tokens are about equally likely
    assert proofs.mode(reply(flat, flat), 2.0)[1] == "raw"
    assert proofs.mode(reply([value / 2 - 5.0 for value in flat], flat), 2.0)[1] == "processed"


def test_an_aborted_reply_that_had_ended_by_itself_proves_nothing_and_stops_nobody() -> None:
    proof: Proof = proofs.abort("stop", 4, 2)
    assert (proof.verdict, proof.trained) == ("unproven", False)
    assert proofs.abort("length", 512, 0, told=False).verdict == "unproven"
    assert proofs.abort(None, 4, 0).verdict == proofs.abort("length", 512, 500).verdict == "failed"


def test_a_second_turn_that_goes_on_from_the_first_is_proven() -> None:
    first = reply([-1.0, -2.0])
    assert proofs.second_turn(first, np.array([1, 2, 0, 1, 9], np.int32)).verdict == "proven"
    assert "drifts at id 3 of 4" in proofs.second_turn(first, np.array([1, 2, 0, 7, 9], np.int32)).detail


def test_no_reply_that_can_be_ended_is_unproven() -> None:
    assert proofs.stop(None, ()).verdict == "unproven"
