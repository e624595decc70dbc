"""Any provider of `/v1/chat/completions`, text only: for evaluation, for making data, for models that others are asked.

Such a provider shows no ids, so nothing that it says can be trained. It may lack usage, `stream_options` and reasoning.
"""

from collections.abc import AsyncGenerator, Set
from contextlib import closing

import msgspec
from msgspec import Raw, Struct

from polar.chat import ChatRequest
from polar.engines.chat_wire import ChatReply, MessageWriter, write_tool_choice, write_tools
from polar.engines.http import RouteMissing, Server
from polar.engines.protocol import Chatted, EngineInfo, Generated, LogprobsMode, ResolvedSampling
from polar.engines.streaming import Reply
from polar.engines.vllm_wire import StreamOptions
from polar.errors import EngineRefusal
from polar.specs import Float32Array, Int32Array

KEY_VARIABLE = "OPENAI_API_KEY"
CHAT = "/chat/completions"
DISPENSABLE = ("stream_options", "max_tokens")  # old servers do not know the first; OpenAI calls the second otherwise by now
MAX_MODEL_LEN = 128_000  # for a provider that does not say; the provider itself refuses what is too long


class _JSONSchema(Struct):
    schema: Raw
    name: str = "reply"


class _ResponseFormat(Struct):
    json_schema: _JSONSchema
    type: str = "json_schema"


class TextBody(Struct, omit_defaults=True):
    """Temperature and top-p are sent always: providers' defaults differ (L04)."""

    model: str
    messages: Raw
    temperature: float
    top_p: float
    top_k: int = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: tuple[str, ...] = ()
    tools: list[dict[str, object]] = []
    tool_choice: object = None
    response_format: _ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None


class _Model(Struct):
    id: str
    max_model_len: int | None = None
    context_length: int | None = None


class _Models(Struct):
    data: list[_Model] = []


class OpenAITextEngine:
    """A provider's model. Made inside a running event loop, which owns its connections; satisfies `Engine`, for text.

    Args:
        url: what stands before `/chat/completions`, `https://host/v1`.
        model: the provider's name of it.
        api_key: sent as bearer token; empty for none.
        key_variable: the environment variable that holds the key, for the advice when it is refused.
    """

    name = "openai_text"
    logprobs_mode: LogprobsMode = "raw"  # never given

    def __init__(self, url: str, model: str, api_key: str = "", *, key_variable: str = KEY_VARIABLE) -> None:
        self._server = Server(url, api_key, key_variable)
        self._model = model
        self._unknown: Set[str] = frozenset()  # fields that the provider refuses by name
        self._messages = MessageWriter("reasoning_content")

    @property
    def url(self) -> str:
        return self._server.url

    def generate(
        self, request_id: str, prompt_ids: Int32Array, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Generated, None]:
        """Refused."""
        raise self._cannot("generate from ids")

    async def chat(
        self, request_id: str, request: ChatRequest, sampling: ResolvedSampling, *, session_id: str = ""
    ) -> AsyncGenerator[Chatted, None]:
        """Stream one generation from messages. Closed before its end, the generator drops the connection.

        Raises:
            EngineRefusal: the provider says that the request is wrong (400), or cannot be asked for this.
            EngineError: it is down, overloaded, or breaks off.
        """
        if sampling.regex:
            raise self._cannot("sample under a regular expression")
        reply, streamed = ChatReply(), request.stream
        with self._server.faults(), closing(await self._begun(request, sampling)) as answer:
            del request  # the history is not held while the provider works
            if not streamed:
                reply.whole(await answer.read_all())
            while data := await answer.read():
                if (chatted := reply.feed(data)) is not None:
                    yield chatted
        yield reply.end()

    async def abort(self, request_id: str) -> None:
        """Nothing: a provider is told to stop by dropping the connection."""

    async def info(self) -> EngineInfo:
        """The model, and its context length where the list of models tells it."""
        try:
            models = (await self._server.get("/models", _Models)).data
        except RouteMissing:
            models = []
        found = next((model for model in models if model.id == self._model), None)
        length = (found.max_model_len or found.context_length) if found else None
        return EngineInfo(
            model=self._model,
            model_path="",
            max_model_len=length or MAX_MODEL_LEN,
            constrains=True,
            token_in=False,
            chats=True,
            shows_ids=False,
            scores=False,
        )

    async def tokenize(self, text: str) -> Int32Array:
        """Refused."""
        raise self._cannot("tell ids")

    async def score(self, ids: Int32Array) -> Float32Array:
        """Refused."""
        raise self._cannot("score")

    async def close(self) -> None:
        """Give back connections."""
        self._server.close()

    async def _begun(self, request: ChatRequest, sampling: ResolvedSampling) -> Reply:
        """The answer once it has begun. What can be said without a field that the provider does not know is said without it.

        A refusal may name a field for its value too: it is left out of later requests only if that helped.
        """
        unknown = self._unknown
        while True:
            try:
                reply = await self._server.begun("POST", CHAT, lambda: self._body(request, sampling, unknown))  # noqa: B023
            except EngineRefusal as refusal:
                news = {field for field in DISPENSABLE if field in str(refusal)} - unknown
                if not news:
                    raise
                unknown = unknown | news
            else:
                self._unknown |= unknown
                return reply

    def _body(self, request: ChatRequest, sampling: ResolvedSampling, unknown: Set[str]) -> bytes:
        schema = sampling.json_schema
        body = TextBody(
            model=self._model,
            messages=self._messages.write(request.messages),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop=request.sampling.stop,
            tools=write_tools(request.tools),
            tool_choice=write_tool_choice(request.tool_choice) if request.tools else None,
            response_format=None if schema is None else _ResponseFormat(_JSONSchema(schema)),
            stream=request.stream,
            stream_options=StreamOptions() if request.stream and "stream_options" not in unknown else None,
        )
        if "max_tokens" in unknown:
            body.max_completion_tokens = sampling.max_tokens
        else:
            body.max_tokens = sampling.max_tokens
        return msgspec.json.encode(body)

    def _cannot(self, what: str) -> EngineRefusal:
        return EngineRefusal(f"the provider at {self.url} serves text only; it cannot {what}")
