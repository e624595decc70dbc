"""What goes over the wire, in the shapes of vLLM's token routes.

Requests refuse fields that they do not know: a sampling parameter that is not honoured is an error that names it.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Literal

from msgspec import Meta, Struct

from polar.errors import RequestError

Count = Annotated[int, Meta(ge=1)]
FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "wait", "abort"]


class Refused(RequestError):
    """The request is refused, with the status and, where one is to blame, the name of the parameter."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class SamplingParams(Struct, forbid_unknown_fields=True, frozen=True):
    """Defaults are vLLM's. `top_k` 0 and -1 are "off"."""

    max_tokens: Count = 16
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: Literal[0] | None = None
    prompt_logprobs: Literal[0] | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class GenerateRequest(Struct, forbid_unknown_fields=True):
    """Body of `/inference/v1/generate`. `cache_salt` must be absent: new weights flush the prefix cache by themselves."""

    token_ids: list[int]
    sampling_params: SamplingParams = SamplingParams()
    request_id: str | None = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: None = None


class AbortRequest(Struct, forbid_unknown_fields=True):
    request_ids: list[str]


class ReloadArguments(Struct, forbid_unknown_fields=True):
    weights_path: str


class RpcRequest(Struct, forbid_unknown_fields=True):
    method: Literal["reload_weights"]
    kwargs: ReloadArguments


class VersionRequest(Struct, forbid_unknown_fields=True):
    new_version: str


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None = None


class TopLogprob(Struct):
    token_id: int
    logprob: float
    rank: int


class TokenLogprob(Struct):
    token_id: int
    logprob: float
    rank: int
    top_logprobs: list[TopLogprob]


class Logprobs(Struct):
    content: list[TokenLogprob]


class WeightVersion(Struct):
    version: str
    start: int
    end: int


class PromptLogprob(Struct):
    logprob: float
    rank: int
    decoded_token: None = None


class Choice(Struct, kw_only=True):
    """`weight_versions` comes with `finish_reason` and covers all tokens of the choice."""

    index: int = 0
    finish_reason: FinishReason | None
    stop_reason: int | None
    token_ids: list[int]
    routed_experts: None = None
    sampling_mask: None = None
    weight_versions: list[WeightVersion] | None
    logprobs: Logprobs | None


class StreamUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class Usage(StreamUsage):
    prompt_tokens_details: None = None
    completion_tokens_details: None = None


class Chunk(Struct, kw_only=True):
    """One event of a stream."""

    request_id: str
    usage: StreamUsage | None = None
    output_mode: str = "tokens"
    choices: list[Choice]


class Reply(Struct, kw_only=True):
    """The answer without streaming."""

    request_id: str
    model: str
    created: int
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    prompt_token_id_logprobs: None = None
    prompt_token_ids: None = None
    mm_placeholders: None = None
    metrics: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    output_mode: str = "tokens"
    choices: list[Choice]


class Error(Struct):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(Struct):
    error: Error


def token_logprob(token_id: int, logprob: float, rank: int) -> TokenLogprob:
    """An entry of `logprobs.content`; of the alternatives it lists the sampled token alone, as `logprobs: 0` asks."""
    return TokenLogprob(token_id, logprob, rank, [TopLogprob(token_id, logprob, rank)])


def version_spans(versions: Sequence[str]) -> list[WeightVersion]:
    """Runs of equal `versions`, one per token, as half-open spans."""
    spans: list[WeightVersion] = []
    for version, run in groupby(versions):
        start = spans[-1].end if spans else 0
        spans.append(WeightVersion(version, start, start + sum(1 for _ in run)))
    return spans
