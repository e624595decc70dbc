"""The exception tree. Callers decide by type: what is retryable is an `InfrastructureError`, and nothing else is.

PolarError
├── UsageError              the user's input is wrong: a task file, a flag, an unknown harness
├── CaptureError            tokens that cannot be trusted; carries the id of the fault in docs/faithfulness.md (T08, L02, …)
├── BridgeRefused           a renderer cannot go on from sampled ids; the history is rendered whole, and forks
├── RequestError            a harness's request is refused; carries the HTTP status and a machine-readable code
│   ├── InvalidRequest          400
│   ├── ContextLengthExceeded   400, in each dialect's own shape
│   ├── UnknownKey              401
│   ├── UnknownRoute            404
│   └── SessionFrozen           409
└── InfrastructureError     our side or the machine failed; a retry may succeed, and never counts as the agent's failure
    ├── EngineError             the inference server is down, died, or answered nonsense
    │   └── EngineRefusal           it says that it was asked for what it cannot do (400)
    ├── SandboxError            a sandbox could not be made or run
    ├── StoreError              the store cannot be written or read (disk full, damaged, newer schema)
    ├── InstallError            a harness, Node or a model could not be installed
    └── EvaluatorError          the evaluator itself broke (not: the answer is wrong)
"""


class PolarError(Exception):
    """Base of every error that Polar raises on purpose."""


class UsageError(PolarError):
    """The user's input cannot be used; the message says what was expected, what came, and what to do."""


class CaptureError(PolarError):
    """Tokens cannot be trusted.

    Attributes:
        code: id of the fault, for example `T08`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class BridgeRefused(PolarError):
    """A renderer cannot go on from sampled ids; the history is to be rendered whole."""


class RequestError(PolarError):
    """A harness's request is refused.

    Attributes:
        status: HTTP status.
        code: machine-readable code, as the dialects' own error bodies carry one.
    """

    status = 400
    code = "invalid_request"


class InvalidRequest(RequestError):
    """The request is malformed, or asks for something that is refused by name."""


class ContextLengthExceeded(RequestError):
    """The prompt leaves no room for a reply. It is never trimmed (T10)."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, but the messages resulted in {prompt_tokens} tokens."
        )
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class UnknownKey(RequestError):
    """No session has this model key."""

    status = 401
    code = "invalid_api_key"


class UnknownRoute(RequestError):
    """The gateway does not serve this path."""

    status = 404
    code = "unknown_url"


class SessionFrozen(RequestError):
    """The session is closed to further calls (C02)."""

    status = 409
    code = "session_frozen"


class InfrastructureError(PolarError):
    """Our side or the machine failed; a retry may succeed."""


class EngineError(InfrastructureError):
    """The inference server is down, died, or answered what it must not."""


class EngineRefusal(EngineError):
    """The inference server says that it was asked for what it cannot do (400)."""


class SandboxError(InfrastructureError):
    """A sandbox could not be made, or could not run a command."""


class StoreError(InfrastructureError):
    """The store cannot be written or read."""


class InstallError(InfrastructureError):
    """A harness, Node or a model could not be installed."""


class EvaluatorError(InfrastructureError):
    """The evaluator itself broke; says nothing about the answer."""
