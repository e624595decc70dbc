"""Faults of calls and sessions."""

from polar.audit.faults.fault import DAMAGED, MISBUILT, Fault

CALLS = (
    Fault(
        "C01",
        "the harness retries after a timeout: a call twice, or out of step",
        ("polar.gateway.retries.request_hash", "excluded superseded", "excluded undelivered"),
        "only what was not delivered is a retry: replayed if committed, else joined or superseded; all else is a sample",
        (
            "tests/gateway/test_calls.py::test_a_hung_up_stream_that_is_asked_again_is_superseded",
            "tests/gateway/test_calls.py::test_a_retry_of_a_whole_reply_joins_the_generation_that_its_client_left",
            "tests/gateway/test_calls.py::test_a_committed_answer_that_never_arrived_is_replayed_after_a_restart",
            "tests/gateway/test_races.py::test_two_equal_requests_at_once_are_two_samples",
        ),
    ),
    Fault(
        "C02",
        "a straggler calls after its session was closed",
        ("polar.errors.SessionFrozen", "status 409"),
        "409",
        (
            "tests/gateway/test_requests.py::test_a_frozen_session_is_409",
            "tests/gateway/test_races.py::test_a_request_that_arrives_in_pieces_around_the_freeze_is_409",
        ),
    ),
    Fault(
        "C03",
        "the harness hangs up in mid-stream, and the engine goes on",
        ("polar.engines.proofs.abort", "self-test C03", "excluded aborted"),
        "aborted on the engine at once; recorded as `aborted`, never trained as complete",
        (
            "tests/gateway/test_calls.py::test_hanging_up_in_mid_stream_frees_the_engine_and_trains_nothing",
            "tests/gateway/test_races.py::test_a_stream_that_ends_before_the_first_token_frees_the_engine",
        ),
    ),
    Fault(
        "C04",
        "parallel calls in one session: parents are told by order of arrival",
        ("polar.audit.calls.check_lineage", "finding lineage", "fork ambiguous"),
        "a parent is found by minted ids and fingerprints; what is ambiguous forks",
        (
            "tests/gateway/test_calls.py::test_parallel_calls_of_one_session_are_branches_in_any_order",
            "tests/tokens/test_tree.py::test_the_order_of_arrival_does_not_change_what_the_tree_says",
            DAMAGED,
        ),
    ),
    Fault(
        "C05",
        "a turn cut by length is asked again, and the discarded tokens are trained",
        ("polar.audit.traces.exclusions", "excluded superseded"),
        "`superseded`, unless a later prompt holds it",
        (
            "tests/trajectory/test_builders.py::test_a_reply_cut_by_length_and_asked_again_is_superseded",
            "tests/audit/test_exclusions.py::test_the_audit_and_the_builders_exclude_the_same_calls_for_the_same_reason",
        ),
    ),
    Fault(
        "C06",
        "titles, quota checks and summaries are trained with the reward",
        ("polar.gateway.kinds.call_kind", "excluded auxiliary"),
        "each call has a kind, by the harness's profile, else by structure; `auxiliary` is counted, not trained. A harness that "
        "nobody described can still have a title taken for the agent's, if it asks for it first",
        (
            "tests/gateway/test_kinds.py::test_without_rules_structure_tells_side_calls_and_sub_agents",
            "tests/gateway/test_kinds.py::test_a_header_of_the_harness_names_the_kind",
            "tests/trajectory/test_builders.py::test_untrusted_aborted_superseded_and_auxiliary_tokens_are_counted_by_name",
        ),
    ),
    Fault(
        "C07",
        "sub-agents and compacted contexts are dropped",
        ("polar.audit.traces.check_traces", "finding mask"),
        "each branch is a trace of its own, its kind beside it",
        (
            "tests/trajectory/test_builders.py::test_the_longer_branch_goes_on_and_the_other_names_it",
            "tests/gateway/test_kinds.py::test_after_a_compaction_the_agent_goes_on_from_the_summary",
            MISBUILT,
        ),
    ),
    Fault(
        "C08",
        "an unknown key mints a session",
        ("polar.errors.UnknownKey", "status 401"),
        "401",
        ("tests/gateway/test_requests.py::test_an_unknown_key_is_401_and_mints_nothing",),
    ),
    Fault(
        "C09",
        "no call is captured, and the run goes on",
        ("finding no_model_calls",),
        "the session fails by name, and a run of such sessions stops",
        (
            "tests/rollout/test_runner.py::test_a_harness_that_never_calls_the_model_is_an_error_by_name",
            "tests/rollout/test_runner.py::test_a_run_in_which_no_harness_calls_the_model_is_stopped",
        ),
    ),
    Fault(
        "C10",
        "a dead engine, store or sandbox is shown as the agent's failure",
        ("polar.errors.InfrastructureError", "finding harness_crash", "excluded no_reward"),
        "no reward, never 0; the same command tries again",
        (
            "tests/rollout/test_runner.py::test_a_crashed_harness_is_no_zero",
            "tests/rollout/test_runner.py::test_an_engine_fault_costs_the_session_its_reward_and_is_tried_again",
            "tests/rollout/test_breakdowns.py::test_an_engine_that_dies_in_mid_run_stops_it_and_nothing_is_lost",
        ),
    ),
    Fault(
        "C11",
        "the harness asks for a route that the proxy lacks",
        ("polar.errors.UnknownRoute", "finding unknown_route", "status 404"),
        "models, token counts and compaction are served; the rest is 404 in the API's own shape, and counted",
        (
            "tests/gateway/test_requests.py::test_a_route_that_nobody_serves_is_counted_without_the_key",
            "tests/gateway/test_requests.py::test_an_unknown_route_is_404_and_health_is_200",
        ),
    ),
    Fault(
        "C12",
        "a connection dies of silence while a long generation runs",
        ("polar.gateway.app.KEEP_ALIVE_EVERY", "polar.gateway.app.HEADERS_AFTER"),
        "headers after ten seconds, then keep-alives in the API's own form",
        ("tests/gateway/test_requests.py::test_a_slow_engine_gets_early_headers_and_keep_alives",),
    ),
)
