"""What a trainer takes that knows one sequence for each sample: a trace of each session, chosen by a rule that has a name."""

from typing import Literal

from polar.errors import UsageError
from polar.specs import Trace
from polar.training.gates import temperature
from polar.trajectory.chains import Sampling
from polar.trajectory.export import Exported

Several = Literal["refuse", "longest"]


def one_trace(session: Exported, several: Several) -> Trace | None:
    """The trace that stands for a session; None where it has no reward, or nothing that is trained.

    Of several traces `longest` takes the one with the most trained tokens, the first of equal ones.

    Raises:
        UsageError: there are several, and the rule is `refuse`.
    """
    traces = [trace for trace in session.trajectory.traces if trace.reward is not None and trace.loss_mask.any()]
    if len(traces) > 1 and several == "refuse":
        kinds = ", ".join(trace.branch.kind for trace in traces)
        raise UsageError(
            f"session {session.result.session_id} has {len(traces)} traces ({kinds}), and this trainer takes one sequence of a "
            'session: several="longest" trains the one with the most sampled tokens, and counts what it leaves out; '
            "`polar train` trains them all"
        )
    return max(traces, key=lambda trace: int(trace.loss_mask.sum()), default=None)


def left_out(session: Exported, trace: Trace | None) -> int:
    """Trainable tokens of a session that `trace` does not train."""
    return session.trajectory.accounting.trained - (int(trace.loss_mask.sum()) if trace is not None else 0)


def trained_at(trace: Trace) -> float:
    """The temperature at which a trainer has to compute log-probabilities, so that they are what the engine's are of.

    Raises:
        CaptureError: L01, it cannot compute them.
    """
    return temperature(Sampling(trace.temperature, trace.top_p, trace.top_k, trace.logprobs_mode))
