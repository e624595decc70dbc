"""Faults of log-probabilities, and of what they are of."""

from polar.audit.faults.fault import DAMAGED, SAMPLED, Fault

LOGPROBS = (
    Fault(
        "L01",
        "log-probabilities are raw or processed and nobody knows; temperature, top-p and top-k are lost",
        ("polar.trajectory.builders.build", "polar.engines.proofs.mode", "self-test L01", "finding L01"),
        "the mode is found out at the start; mode and sampling stand on each call and trace; a trace that mixes them is refused, "
        "and what a prefill cannot reproduce is not rescored but counted",
        (
            "tests/trajectory/test_builders.py::test_calls_of_one_trace_that_were_sampled_differently_stop_the_build",
            "tests/trajectory/test_builders.py::test_a_call_that_does_not_say_how_it_was_sampled_stops_the_build",
            "tests/audit/test_rescore.py::test_processed_values_are_compared_only_where_nothing_was_processed",
            "tests/engines/test_self_test.py::test_processed_log_probabilities_are_found_out_and_noted_on_the_engine",
        ),
    ),
    Fault(
        "L02",
        "sentinels: −9999, NaN, null, a positive value",
        ("polar.tokens.detectors.check_logprobs", "polar.audit.calls.check_sampled", "self-test L02"),
        "every value has to be finite, not positive and above a floor, or the call fails",
        (
            "tests/tokens/test_detectors.py::test_a_value_that_is_no_log_probability_is_refused_and_named",
            SAMPLED,
            DAMAGED,
        ),
    ),
    Fault(
        "L03",
        "the engine's numerics drift with batch, chunking or prefix cache",
        ("polar.audit.rescore.rescore", "polar.engines.proofs.prefill", "self-test L03", "finding L03"),
        "δ, recomputed minus recorded, is measured at the start and by an audit with `--rescore`; beyond its tolerance both fail",
        (
            "tests/audit/test_rescore.py::test_one_changed_value_is_found_and_named",
            "tests/audit/test_rescore.py::test_another_context_is_found",
            "tests/engines/test_self_test.py::test_a_server_with_a_habit_is_found",
        ),
    ),
    Fault(
        "L04",
        "sampling defaults come from the model's generation config, and nobody knows",
        ("polar.audit.calls.check_sampling", "finding sampling"),
        "every request says all of it; the call records what was asked and what was used",
        (
            "tests/gateway/test_calls.py::test_the_task_samples_not_the_harness",
            "tests/engines/test_vllm.py::TestGenerate::test_the_request_says_everything_and_leaves_nothing_to_the_models_defaults",
            "tests/engines/test_vllm_chat.py::TestRequest::test_every_sampling_parameter_is_pinned",
            DAMAGED,
        ),
    ),
    Fault(
        "L05",
        "sampling under a grammar: log-probabilities are those of the masked distribution",
        ("polar.engines.protocol.ResolvedSampling.constrained", "excluded constrained"),
        "the call is `constrained`: counted, never trained; the mask is stored where the engine tells it",
        (
            "tests/gateway/test_requests.py::test_a_schema_constrains_where_it_can_and_those_tokens_are_not_trained",
            "tests/gateway/test_extras.py::test_a_grammars_tokens_stay_out_of_training_with_their_mask",
        ),
    ),
)
