"""`/v1/completions` with ids in: the way to servers that lack `/inference/v1/generate`.

It gives the ids of what was sampled too (`return_token_ids`, vLLM 0.10.2 and later), but tells no versions.
"""

import msgspec
from msgspec import Raw, Struct

from polar.engines.protocol import ResolvedSampling
from polar.engines.vllm_wire import StreamOptions, StructuredOutputs, structured

COMPLETIONS = "/v1/completions"


class CompletionRequest(Struct, omit_defaults=True):
    """Fields without a default are sent always: each would otherwise be taken from the model's files (L04)."""

    prompt: Raw
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    return_token_ids: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    model: str | None = None


def completion_body(
    request_id: str, prompt: Raw, sampling: ResolvedSampling, salt: str | None, model: str | None = None
) -> bytes:
    """A streamed generation from ids, which `prompt` holds as JSON; `model` names an adapter."""
    request = CompletionRequest(
        prompt=prompt,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        return_token_ids=True,
        logprobs=0,
        stop_token_ids=sampling.stop_token_ids,
        structured_outputs=structured(sampling),
        request_id=request_id,
        cache_salt=salt,
        stream=True,
        stream_options=StreamOptions(),
        model=model,
    )
    return msgspec.json.encode(request)


def scoring_body(prompt: Raw, model: str | None = None) -> bytes:
    """A request for the log-probabilities of a prompt."""
    return msgspec.json.encode(CompletionRequest(prompt, 1, 1.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, prompt_logprobs=0, model=model))
