"""SGLang's `/v1/chat/completions`, asked unstreamed, because streamed it refuses to tell ids: a reply comes whole.

From the source of SGLang 0.5.23, as in `polar.engines.sglang`. What matters of it:

- `return_token_ids` has a choice tell `prompt_token_ids` and `response_token_ids`, `return_meta_info` its `meta_info`, which is
  that of `/generate`: log-probabilities with their ids, version spans, and what stopped it.
- A reply with calls ends by `tool_calls`, and then nothing says at which id it stopped. Of logits that are NaN the id with
  the log-probability is then another than the one in the reply, which is refused all the same (T08).
- `max_tokens` beyond the room that the prompt leaves is refused; without it the room is the limit.
- Some parsers of tool calls have replies sampled under a grammar whenever there are tools, which nothing tells (L05).
"""

import msgspec
from msgspec import Raw, Struct

from polar.chat import ChatRequest
from polar.engines.chat_wire import ChatReply, PromptReader, write_tool_choice, write_tools
from polar.engines.protocol import Chatted, ResolvedSampling
from polar.engines.sglang_wire import Event, MetaInfo, TokenId, TokenStream, sampling_seed
from polar.errors import EngineError

CHAT = "/v1/chat/completions"
NO_ROOM = "Requested token count exceeds"  # how SGLang refuses `max_tokens` that the prompt leaves no room for
MASKING_PARSERS = frozenset({"beam", "glm47", "inkling", "kimi_k3", "response_template"})


class ServerInfo(Struct):
    """Of `/server_info`: how the server was started."""

    tool_call_parser: str | None = None

    @property
    def masks(self) -> bool:
        """It samples replies under grammars that it does not tell of (L05)."""
        return self.tool_call_parser in MASKING_PARSERS


class _JSONSchema(Struct):
    schema: Raw
    name: str = "reply"


class _ResponseFormat(Struct):
    json_schema: _JSONSchema
    type: str = "json_schema"


class ChatBody(Struct, omit_defaults=True):
    """Fields without a default are sent always: each would otherwise be taken from the model's files (L04)."""

    messages: Raw
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    rid: str
    logprobs: bool
    return_token_ids: bool
    return_meta_info: bool
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    tools: list[dict[str, object]] = []
    tool_choice: object = None
    response_format: _ResponseFormat | None = None
    regex: str = ""
    chat_template_kwargs: Raw | None = None


def chat_body(rid: str, request: ChatRequest, messages: Raw, sampling: ResolvedSampling, max_tokens: int | None) -> bytes:
    """One choice for a request with its `messages` as JSON; `max_tokens` None for as many as there is room for."""
    schema = sampling.json_schema
    body = ChatBody(
        messages=messages,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or -1,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=sampling_seed(),
        rid=rid,
        logprobs=True,
        return_token_ids=True,
        return_meta_info=True,
        max_tokens=max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        tools=write_tools(request.tools),
        tool_choice=write_tool_choice(request.tool_choice) if request.tools else None,
        response_format=None if schema is None else _ResponseFormat(_JSONSchema(schema)),
        regex=sampling.regex,
        chat_template_kwargs=request.extra.get("chat_template_kwargs"),
    )
    return msgspec.json.encode(body)


class _Choice(Struct):
    prompt_token_ids: Raw = Raw()  # read apart: it may be most of the reply
    response_token_ids: list[TokenId] | None = None
    meta_info: MetaInfo | None = None


class _Reply(Struct):
    choices: list[_Choice] = []


_REPLY = msgspec.json.Decoder(_Reply)


def read_reply(body: bytes, read_prompt: PromptReader) -> Chatted:
    """A whole reply, as one piece.

    Raises:
        EngineError: it lacks ids (T08), versions for each token (W01), or does not belong together (T06, T08).
    """
    said = ChatReply()
    said.whole(body)
    chatted = said.end()
    choice = _REPLY.decode(body).choices[0]
    prompt, meta = bytes(choice.prompt_token_ids), choice.meta_info
    if not prompt.startswith(b"[") or choice.response_token_ids is None or meta is None:
        raise EngineError("T08: the engine told no ids with its reply: is it too old to know `return_token_ids`?")
    if meta.weight_versions is None and meta.completion_tokens:
        raise EngineError("W01: the engine names no weights for each token: update SGLang")
    stream = TokenStream()
    stream.take(Event(choice.response_token_ids, meta))
    return Chatted(stream.end(), chatted.deltas, read_prompt(prompt[1:-1]), chatted.parsed)
