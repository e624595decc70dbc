"""What everybody passes around as data: tasks, profiles, results.

Structs that a user writes forbid unknown fields, so that a typo is an error and not a default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from polar.chat import Message, Tool

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
UInt8Array = NDArray[np.uint8]
Extras = Mapping[str, NDArray[np.generic]]  # what is known of each of n tokens besides, by name; [n, …]
NO_EXTRAS: Extras = MappingProxyType({})

Stage = Literal["queued", "preparing", "ready", "running", "scoring", "done"]
SessionStatus = Literal["completed", "failed", "timed_out", "cancelled"]
CallKind = Literal["agent", "subagent", "compaction", "auxiliary"]
BuilderName = Literal["per_request", "prefix_merging"]
ExcludedReason = Literal[
    "aborted",  # the harness hung up, or a pause or a stop aborted the generation
    "superseded",  # the harness asked again, and went on from the other answer
    "undelivered",  # the answer never reached the harness, and no later prompt holds it
    "untrusted",  # a detector refused the call's tokens
    "auxiliary",  # title, quota and other side calls
    "constrained",  # sampled under a grammar: the log-probabilities are of the masked distribution
    "truncated",  # cut by length, where the training policy leaves that out
    "stop_tail",  # sampled after a stop text that the harness asked for, before the engine could be stopped
    "external",  # answered by a model that is not the policy: a frozen one, or somebody else's
    "unproven",  # sampled by an engine that shows no ids
    "no_reward",  # the session ended without a reward: infrastructure failed, or it was cancelled
]


class SamplingSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The trainer's sampling; it overrides the harness's.

    Attributes:
        max_tokens: bounds each call; None leaves it to harness and room.
        regex: what every reply must match as a whole, for stress tests and for making data; such replies are `constrained`,
            never trained. "" lets the policy speak freely.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    regex: str = ""


Treatment = Literal["train", "exclude"]
ReasoningHistory = Literal[
    "as_sampled",  # a history keeps its reasoning: prompts go on from the stored ids
    "as_sent",  # each prompt is what the model's template makes of what was sent; where reasoning is dropped, it forks
]


class TrainingPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """What becomes of tokens that are the policy's own, and of which it is a choice whether to train them.

    Attributes:
        auxiliary: titles, quota checks and other side calls.
        aborted: answers that were not sampled to their end.
        superseded: answers in whose place another was asked.
        truncated: other answers that were cut by length.
    """

    auxiliary: Treatment = "exclude"
    aborted: Treatment = "exclude"
    superseded: Treatment = "exclude"
    truncated: Treatment = "train"


class HarnessSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Which harness runs a task. `options` belong to the harness (for `shell`: `command`)."""

    name: str = "pi"
    options: dict[str, str] = {}


class EvaluatorSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """What turns a finished session into a reward.

    Attributes:
        kind: `command` or `session_completed`.
        command: for `command`, a shell line. It runs in a fresh copy of the workspace, with `POLAR_ANSWER` naming a file
            with the last text that the policy wrote. Any exit status but 0 is reward 0.
        reward: what exit status 0 is worth: `exit_status` makes it 1, `printed` takes X from a last line `reward: X`. What
            the command runs of the agent's can print too, so ask for `printed` only where it cannot print last.
        files: for `command`, files put into that copy before it runs, path → text; the agent never sees them.
    """

    kind: str = "session_completed"
    command: str = ""
    files: dict[str, str] = {}
    reward: Literal["exit_status", "printed"] = "exit_status"


class Timeouts(Struct, frozen=True, forbid_unknown_fields=True):
    """Budget of each stage in seconds. Waiting in a queue is charged to nobody."""

    prepare: float = 300.0
    run: float = 600.0
    score: float = 120.0


class Task(Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked.

    Attributes:
        id: unique in a run; letters, digits, `.`, `_` and `-`.
        instruction: what the harness is told.
        workspace: files that the session starts with, path → text; or the path of a directory to copy.
        samples: sessions per task (a GRPO group).
        reasoning_history: what becomes of earlier reasoning in later prompts (T03).
    """

    id: str
    instruction: str
    workspace: dict[str, str] | str = {}
    harness: HarnessSpec = HarnessSpec()
    evaluator: EvaluatorSpec = EvaluatorSpec()
    samples: int = 1
    sampling: SamplingSpec = SamplingSpec()
    reasoning_history: ReasoningHistory = "as_sampled"
    timeouts: Timeouts = Timeouts()
    metadata: dict[str, str] = {}


NormaliserName = Literal[
    "claude_code_attribution",  # the billing header in front of Claude Code's system prompt, which differs per agent
    "trim_text",  # a reply's text comes back without the whitespace around it
    "think_in_text",  # a reply's reasoning comes back as `<think>…</think>` in its text
]


class KindRule(Struct, frozen=True, forbid_unknown_fields=True):
    """When a call is of `kind`: all that is given must hold. Patterns are searched (`re.search`), an empty one holds always.

    Attributes:
        header: lower-case name of a header that must be there, with a value that `header_value` matches.
        system: pattern in the leading system messages' text.
        last: pattern in the text of the last message, which is no tool's answer: that could hold any text.
        tools: whether the request has tools: `some`, `none`, or `any`.
    """

    kind: CallKind
    header: str = ""
    header_value: str = ""
    system: str = ""
    last: str = ""
    tools: Literal["any", "some", "none"] = "any"


class HarnessProfile(Struct, frozen=True, forbid_unknown_fields=True):
    """What the gateway knows of a harness, handed over when a session opens.

    Attributes:
        name: the harness, or `any` for a program that nobody described.
        version: pinned version, for the call's provenance.
        retry_grace: seconds that a non-streaming generation goes on after its client hung up.
        normalisers: what the harness does to a history that means nothing, in the order of applying.
        kinds: the first rule that holds names a call's kind; a call that none fits is judged by its structure.
    """

    name: str = "any"
    version: str = ""
    retry_grace: float = 30.0
    normalisers: tuple[NormaliserName, ...] = ()
    kinds: tuple[KindRule, ...] = ()


class VersionSpan(Struct, frozen=True):
    """Tokens `start` to `end` (half-open) were sampled under `policy_version`."""

    start: int
    end: int
    policy_version: int


class Finding(Struct, frozen=True):
    """A named observation about a call or a session. `code` is a fault id (T14) or a reason (`history_rewritten`)."""

    code: str
    message: str
    call_id: str = ""


class Accounting(Struct, frozen=True):
    """`sampled = trained + Σ excluded[reason]`, in tokens."""

    sampled: int = 0
    trained: int = 0
    excluded: dict[ExcludedReason, int] = {}

    @property
    def holds(self) -> bool:
        return self.sampled == self.trained + sum(self.excluded.values())

    def __add__(self, other: "Accounting") -> "Accounting":
        excluded = dict(self.excluded)
        for reason, count in other.excluded.items():
            excluded[reason] = excluded.get(reason, 0) + count
        return Accounting(self.sampled + other.sampled, self.trained + other.trained, excluded)


class Branch(Struct, frozen=True):
    """Where a trace comes from. `parent_trace` is the index of the trace it left, None for one that starts at a root."""

    kind: CallKind = "agent"
    parent_trace: int | None = None


@dataclass(frozen=True)
class Trace:
    """One token sequence for training.

    Attributes:
        prompt_ids: int32[p], context before the first token that this trace trains.
        response_ids: int32[r], from there on; sampled and context tokens.
        loss_mask: uint8[r], 1 where this trace trains the token.
        response_logprobs: float32[r], the engine's value where `loss_mask` is 1, else 0.
        policy_versions: spans over the *trained* tokens in their order; they cover exactly `loss_mask.sum()` tokens.
        call_ids: the calls whose sampled tokens are trained here, in order.
        answers: places in `response_messages` of what these calls said, as they said it; a history that came back without an
            answer as a message of its own has no place for it.
        temperature, top_p, top_k: how the engine sampled them, the same for all (`top_k` 0: no limit).
        logprobs_mode: what `response_logprobs` are of: `raw` logits, or `processed` ones, after temperature and truncation.
        weight: this trace's share of its session's loss; the shares of a session sum to 1.
    """

    prompt_ids: Int32Array
    response_ids: Int32Array
    loss_mask: UInt8Array
    response_logprobs: Float32Array
    policy_versions: tuple[VersionSpan, ...]
    call_ids: tuple[str, ...]
    prompt_messages: tuple[Message, ...]
    response_messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    finish_reason: str
    temperature: float
    top_p: float
    top_k: int
    logprobs_mode: str
    reward: float | None = None
    weight: float = 1.0
    branch: Branch = Branch()
    answers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trajectory:
    """The traces of a session with their accounting."""

    status: SessionStatus
    traces: tuple[Trace, ...]
    accounting: Accounting
    builder: str
    findings: tuple[Finding, ...] = ()
    error: str = ""
    policy: TrainingPolicy = TrainingPolicy()


class Timing(Struct, frozen=True):
    """Seconds that a session spent in each stage, and waiting for one."""

    queued: float = 0.0
    preparing: float = 0.0
    ready: float = 0.0
    running: float = 0.0
    scoring: float = 0.0


SOLVED = 1.0  # the reward from which on a session has solved its task


class SessionResult(Struct, frozen=True):
    """How a session ended. Its traces are built from the store when they are asked for.

    Attributes:
        reward: None when there is none to trust (`failed` by infrastructure, `cancelled`).
        error: empty, or the reason in one line; `error_kind` is its machine-readable name (`no_model_calls`, `engine`, …).
    """

    session_id: str
    task_id: str
    sample: int
    status: SessionStatus
    reward: float | None
    calls: int
    traces: int
    accounting: Accounting
    timing: Timing
    findings: tuple[Finding, ...] = ()
    error: str = ""
    error_kind: str = ""
    sandbox: str = ""
    metadata: dict[str, str] = {}

    @property
    def solved(self) -> bool:
        """Whether its reward is at least `SOLVED`."""
        return self.reward is not None and self.reward >= SOLVED

    @property
    def own_findings(self) -> tuple[Finding, ...]:
        """Findings about the session itself; those about its calls are stored with the calls."""
        return tuple(finding for finding in self.findings if not finding.call_id)
