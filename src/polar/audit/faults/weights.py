"""Faults of weights that change, and of what they are trained with."""

from polar.audit.faults.fault import DAMAGED, MISBUILT, SAMPLED, Fault

WEIGHTS = (
    Fault(
        "W01",
        "an update of the weights in mid-generation is shown as one version",
        ("polar.tokens.detectors.check_versions", "polar.audit.calls.check_sampled", "self-test W01"),
        "versions are spans over tokens; a token without one fails the call",
        (
            "tests/tokens/test_detectors.py::test_spans_that_leave_a_token_or_count_one_twice_are_refused",
            "tests/engines/test_vllm.py::TestWeights::test_an_update_in_mid_generation_keeps_both_versions",
            "tests/engines/test_vllm_adapters.py::test_a_call_keeps_the_version_that_it_began_with",
            SAMPLED,
            DAMAGED,
        ),
    ),
    Fault(
        "W02",
        "what old weights computed for a prefix is used under new ones",
        ("polar.engines.vllm.VllmEngine.reset_prefix_cache",),
        "requests are salted with the version that the server names, and an engine that keeps its cache when told to forget "
        "is an error",
        (
            "tests/engines/test_vllm_completions.py::TestCacheSalt::test_each_request_is_salted_with_the_version_at_its_time",
            "tests/engines/test_vllm.py::TestWeights::test_a_prefix_cache_that_was_kept_is_an_error",
            "tests/engines/test_embedded.py::test_reloaded_weights_use_nothing_of_the_old_cache",
        ),
    ),
    Fault(
        "W03",
        "a pause for an update blocks clients until they time out, or kills a harness",
        ("polar.gateway.app.KEEP_ALIVE_EVERY",),
        "the engine pauses in mid-generation and goes on; streams stay open with keep-alives, and no call fails",
        (
            "tests/faults/test_weights.py::test_a_pause_in_mid_generation_keeps_the_stream_alive_and_both_versions",
            "tests/e2e/test_weights_embedded.py::test_pi_works_through_two_updates_and_the_gates_accept_every_token",
        ),
    ),
    Fault(
        "W04",
        "reward is spread over traces, so that long sessions dominate",
        ("polar.audit.traces.check_traces", "finding weights"),
        "the weights of a session's traces sum to 1, by their trained tokens",
        (
            "tests/trajectory/test_builders.py::test_random_sessions_are_built_as_a_recount_says",
            "tests/faults/test_weights.py::test_a_session_of_many_traces_weighs_as_much_as_one_of_one",
            MISBUILT,
        ),
    ),
)
