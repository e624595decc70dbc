"""Faults of ids: of how prompts are made, and of what is read from replies."""

from polar.audit.faults.fault import DAMAGED, SAMPLED, Fault

TOKENS = (
    Fault(
        "T01",
        "text comes back as other tokens than were sampled",
        ("polar.audit.calls.check_lineage", "polar.tokens.drift.drift_reason", "fork retokenised"),
        "token-in, prompts are spliced from stored ids, nothing is encoded again; in chat mode found at the token, and forks",
        (
            "tests/gateway/test_calls.py::test_every_prompt_starts_with_the_last_prompt_and_what_was_sampled",
            "tests/gateway/test_chat.py::test_a_history_that_the_engine_spells_otherwise_forks_by_name",
            "tests/tokens/test_drift.py::test_with_a_decoder_each_reason_is_told_from_the_others",
            DAMAGED,
        ),
    ),
    Fault(
        "T02",
        "the harness spells tool arguments otherwise: spaces, order of keys, escapes",
        ("polar.gateway.terms.respelled", "normaliser arguments_respelled"),
        "compared parsed; equal means spliced, and the call says so",
        (
            "tests/gateway/test_lineage.py::test_a_history_that_means_the_same_is_continued",
            "tests/gateway/test_lineage.py::test_what_a_harness_does_to_a_reply_is_recorded_by_name",
            "tests/tokens/test_lineage.py::test_arguments_may_be_spelled_otherwise",
        ),
    ),
    Fault(
        "T03",
        "harness or template drop earlier reasoning",
        ("polar.gateway.terms.respelled", "normaliser reasoning_changed", "fork reasoning_dropped"),
        "reasoning is ignored where histories are compared, so stored ids keep it; where an engine renders, or a task wants "
        "`reasoning_history: as_sent`, a history that drops it forks",
        (
            "tests/gateway/test_lineage.py::test_a_history_that_means_the_same_is_continued",
            "tests/gateway/test_reasoning_history.py::test_a_history_keeps_its_reasoning_unless_the_task_wants_it_as_sent",
            "tests/gateway/test_reasoning_history.py::test_reasoning_that_the_harness_leaves_out_is_not_shown_and_forks_by_name",
            "tests/tokens/test_as_sent.py::test_earlier_reasoning_goes_where_the_family_forgets_it",
            "tests/tokens/test_drift.py::test_reasoning_that_the_prompt_opened_is_dropped_with_its_opening",
        ),
    ),
    Fault(
        "T04",
        "a turn begins otherwise at a prompt's end than in a history, so that every episode splits at every turn",
        ("polar.engines.proofs.prefix_stability", "self-test T04", "fork template_glue"),
        "what follows a reply is rendered from the stored ids on, and the self-test compares; in chat mode it forks by name",
        (
            "tests/engines/test_self_test.py::test_a_history_that_drops_what_a_prompt_ended_with_is_named_and_served",
            "tests/engines/test_self_test.py::test_a_bridge_that_renders_otherwise_than_a_history_is_found",
            "tests/faults/test_turns.py::test_glue_before_a_reply_splits_no_conversation",
            "tests/tokens/test_drift.py::test_what_the_prompt_put_before_the_reply_and_history_leaves_out_is_glue",
        ),
    ),
    Fault(
        "T05",
        "two BOS tokens: the template's and the tokenizer's",
        ("polar.engines.proofs.bos", "self-test T05", "polar.tokens.detectors.check_bos", "polar.tokens.detectors.check_counts"),
        "refused by the self-test and on every call; an engine that adds one to ids that it is sent counts one too many",
        (
            "tests/engines/test_self_test.py::test_a_tokenizer_that_adds_two_bos_is_found",
            "tests/engines/test_self_test.py::test_a_bos_that_the_server_adds_to_ids_is_found",
            "tests/faults/test_bos.py::test_a_call_whose_prompt_begins_with_two_bos_is_refused",
        ),
    ),
    Fault(
        "T06",
        "the stop token of a turn is doubled, trimmed, or stands in mid-reply",
        ("polar.tokens.detectors.check_stop", "polar.audit.calls.check_sampled", "self-test T06"),
        "the sampled stop id belongs to the sampled span, and what follows starts after it; anything else fails the call",
        (
            "tests/tokens/test_detectors.py::test_a_doubled_trimmed_or_misplaced_stop_id_is_refused",
            "tests/tokens/test_chatml.py::test_a_sampled_stop_id_is_not_doubled",
            DAMAGED,
        ),
    ),
    Fault(
        "T07",
        "the end of a turn is guessed from data, wrongly, and statistics look clean",
        ("polar.engines.proofs.vocabulary", "self-test T07", "polar.engines.tokenizers.load_tokenizer"),
        "control ids come from the tokenizer, by their spelling; the self-test refuses an engine that has other ids for them",
        (
            "tests/engines/test_self_test.py::test_another_models_vocabulary_is_found",
            "tests/tokens/test_chatml.py::test_a_model_that_does_not_speak_chatml_is_refused",
            "tests/engines/test_tokenizers.py::test_two_files_that_contradict_each_other_are_refused",
        ),
    ),
    Fault(
        "T08",
        "ids or log-probabilities are missing in a reply, or do not agree with the engine's own count",
        (
            "polar.tokens.detectors.check_counts",
            "polar.tokens.detectors.check_extras",
            "polar.audit.calls.check_sampled",
            "self-test T08",
        ),
        "the call fails; text is never tokenized again in place of ids",
        (
            "tests/tokens/test_detectors.py::test_counts_that_differ_are_refused",
            "tests/gateway/test_extras.py::test_a_token_without_its_row_fails_the_call",
            SAMPLED,
            DAMAGED,
        ),
    ),
    Fault(
        "T09",
        "of several choices only the first is kept",
        ("polar.audit.calls.check_owners",),
        "every choice is sampled, stored and checked; they are siblings in the tree",
        (
            "tests/gateway/test_generation.py::test_choices_are_siblings_and_each_is_trained_once",
            "tests/gateway/test_generation.py::test_a_fault_in_one_choice_fails_the_call",
        ),
    ),
    Fault(
        "T10",
        "a prompt is cut silently to fit the context",
        ("polar.errors.ContextLengthExceeded", "finding context_length_exceeded"),
        "the API's own context-length error; nothing is ever trimmed",
        (
            "tests/gateway/test_requests.py::test_a_prompt_without_room_is_a_context_length_error_and_never_trimmed",
            "tests/rollout/test_runner.py::test_a_first_prompt_that_does_not_fit_is_named",
        ),
    ),
    Fault(
        "T11",
        "an image's placeholder is expanded twice",
        ("unserved image", "excluded unproven", "polar.tokens.detectors.check_counts"),
        "a policy that reads text gets no placeholder at all, and the call says so; where the engine renders, such a call is "
        "`unproven`, never trained. Images stay with the messages",
        (
            "tests/dialects/test_openai_chat_sdk.py::test_images_are_recorded_and_the_call_says_that_the_policy_did_not_see_them",
            "tests/faults/test_images.py::test_a_call_whose_images_the_engine_rendered_is_unproven",
        ),
    ),
    Fault(
        "T12",
        "control tokens are smuggled in through tool output or user text",
        ("polar.tokens.tokenizer.Draft",),
        "bodies are encoded as plain text; only the scaffold has control ids",
        (
            "tests/tokens/test_tokenizer.py::test_no_spelling_of_an_added_token_becomes_that_token",
            "tests/tokens/test_chatml.py::test_no_spelling_in_any_place_becomes_a_control_token",
            "tests/tokens/test_chatml.py::test_no_spelling_in_a_bridge_becomes_a_control_token",
        ),
    ),
    Fault(
        "T13",
        "noise of a client breaks the prefix: billing headers, rolling `cache_control`",
        ("polar.tokens.normalisers.normalise", "normaliser claude_code_attribution", "normaliser cache_control"),
        "undone by name: dialect and harness profile normalise, and the call lists what fired",
        (
            "tests/tokens/test_normalisers.py::test_the_billing_header_of_claude_code_goes_and_the_rest_stays",
            "tests/dialects/test_anthropic_messages.py::test_cache_control_and_strings_for_blocks_change_nothing_but_a_note",
        ),
    ),
    Fault(
        "T14",
        "the scaffold rewrites the model's message",
        ("polar.tokens.lineage.Lineage", "fork history_rewritten"),
        "forks at the rewritten message; what was sampled stays a branch of its own",
        ("tests/gateway/test_lineage.py::test_a_history_that_says_something_else_forks_by_name",),
    ),
    Fault(
        "T15",
        "an empty reply in mid-chain",
        ("polar.tokens.detectors.check_counts", "finding T15"),
        "one end-of-turn token is a reply; a reply without a single token is refused",
        (
            "tests/tokens/test_detectors.py::test_counts_that_differ_are_refused",
            "tests/tokens/test_history.py::test_an_empty_reply_is_a_reply",
        ),
    ),
    Fault(
        "T16",
        "text looks like a tool call and is none, or a call has broken JSON",
        ("polar.tokens.hermes.HermesParser", "finding tool_parse_error"),
        "goes to the harness as text, as it was written; raw ids are kept, and the call says so",
        (
            "tests/tokens/test_hermes.py::test_what_is_no_call_goes_out_as_the_model_wrote_it",
            "tests/tokens/test_hermes.py::test_a_call_that_never_ends_is_text",
        ),
    ),
    Fault(
        "T17",
        "tools or system prompt change in mid-session",
        ("polar.tokens.lineage.Lineage", "fork tools_changed", "fork system_changed"),
        "they are the root of a history's fingerprint, so a change forks by name",
        (
            "tests/gateway/test_lineage.py::test_a_history_that_says_something_else_forks_by_name",
            "tests/tokens/test_lineage.py::test_another_system_prompt_forks_by_name",
        ),
    ),
    Fault(
        "T18",
        "a history ends with the assistant's words",
        ("normaliser prefill_closed",),
        "the message is closed, and a new turn opened; the call says so",
        (
            "tests/tokens/test_chatml.py::test_a_history_that_ends_with_the_assistant_is_closed_and_a_new_turn_opened",
            "tests/tokens/test_history.py::test_a_history_that_ends_with_a_reply_is_continued_by_an_empty_bridge",
        ),
    ),
)
