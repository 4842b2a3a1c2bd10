"""Tests that each promise of docs/security.md has a test, and that no other page promises security by itself.

The tests of a promise are named as `file::test`, from the folder `tests`. They are looked up in the source, without an
import: most of them need Ray, vLLM or a kernel with Landlock.
"""

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from documents import PAGES, ROOT

PAGE = ROOT / "docs" / "security.md"
PROMISE = re.compile(r'^\| <a id="([a-z0-9-]+)"></a>`([a-z0-9-]+)` \| (.+) \|$', re.MULTILINE)

FOLDER = "unit/test_hostile_run_folder.py"
FOLDERS = "unit/test_hostile_folders.py"
PARQUET = "unit/storage/test_parquet.py"
TURNS = "unit/tools/test_turn_reader.py"
POLICY_CODE = "integration/tools/test_policy_code.py"
WARM_START = "integration/driver/cluster/test_warm_start.py"
TOKEN_FILE = "unit/driver/cluster/test_token_file.py"
CONFINEMENT = "unit/processes/test_confinement.py"
ISOLATION = "unit/processes/test_isolation.py"
SECCOMP = "unit/processes/test_seccomp.py"
PYTHON_TOOL = "integration/tools/test_python_tool.py"
ISOLATED = "unit/rewards/test_isolated.py"
SANDBOX = "integration/tools/test_sandbox.py"
REMOTE = "unit/tools/test_remote_python.py"
REMOTE_POOL = "integration/tools/test_remote_python.py"
VERIFIER = "unit/rewards/sandbox/test_pool.py"
REDACTION = "unit/text/test_redaction.py"
REPORT = "unit/pages/report/test_page.py"
WATCH_PAGE = "integration/pages/watch/test_page.py"
WATCH_SERVER = "integration/pages/watch/test_server.py"
ENDPOINT = "unit/inference/test_endpoint.py"
PROGRESS = "unit/observers/terminal/test_progress.py"
NOTIFY = "integration/observers/monitoring/test_notify.py"

TESTS: Mapping[str, tuple[str, ...]] = {
    "folder-model-code": (
        f"{FOLDER}::test_eval_trusts_remote_code_only_with_the_users_flag",
        "integration/test_security.py::test_model_issue_runs_model_code_only_when_allowed",
    ),
    "folder-rewards": (f"{FOLDER}::test_eval_imports_no_reward_of_the_run_folder",),
    "folder-tools": (
        f"{FOLDER}::test_eval_runs_tools_of_a_run_folder_only_with_the_users_flag",
        f"{FOLDER}::test_eval_runs_the_examples_of_tools",
        f"{FOLDER}::test_eval_runs_the_example_functions_of_a_run_folder",
    ),
    "folder-engine": (
        f"{FOLDER}::test_eval_passes_an_argument_to_the_engine_only_with_the_users_flag",
        f"{FOLDER}::test_eval_takes_numbers_and_names_of_types_for_the_engine",
        f"{FOLDER}::test_eval_takes_no_folder_of_compiled_code_from_the_run_folder",
        f"{FOLDER}::test_eval_engine_of_a_run_folder_is_taken_by_the_command",
    ),
    "folder-isolation": (f"{FOLDER}::test_eval_takes_no_isolation_from_the_run_folder",),
    "folder-sandbox": (f"{FOLDER}::test_eval_sends_no_token_to_an_address_of_the_run_folder",),
    "folder-data": (
        f"{FOLDER}::test_eval_opens_no_unusual_protocol_of_the_run_folder",
        f"{FOLDER}::test_eval_of_a_part_of_training_opens_no_unusual_protocol",
    ),
    "folder-training": (
        f"{FOLDER}::test_fork_and_replay_ask_for_trust_in_settings_that_run_code",
        f"{FOLDER}::test_fork_and_replay_take_harmless_settings_without_trust",
        "unit/experiments/test_fork.py::test_recorded_code_needs_trust",
    ),
    "folder-pickle": (
        f"{FOLDER}::test_ledger_with_pickled_objects_raises",
        f"{FOLDER}::test_reward_states_are_read_as_json_only",
        "integration/test_security.py::test_payload_runs_when_unpickled",
        "integration/test_security.py::test_trainer_checkpoint_with_payload_raises",
        "unit/test_security.py::test_package_has_no_shell_and_no_unpickling",
    ),
    "folder-yaml": (
        f"{FOLDER}::test_recorded_config_with_more_than_data_raises",
        f"{FOLDER}::test_recorded_config_alias_bomb_ends_at_once",
    ),
    "folder-adapter": (
        "integration/test_security.py::test_adapter_config_with_other_fields_is_refused",
        "unit/models/test_quantized.py::test_damaged_file_is_refused",
    ),
    "folder-paths": (
        f"{FOLDER}::test_manifest_paths_outside_the_checkpoint_are_not_read",
        f"{FOLDERS}::test_manifest_of_a_checkpoint_names_every_file",
    ),
    "folder-files": (
        f"{FOLDERS}::test_unusual_file_is_refused_by_every_command",
        f"{FOLDERS}::test_harmless_folder_is_taken",
    ),
    "folder-template": (
        "integration/test_security.py::test_chat_template_of_a_checkpoint_is_sandboxed",
        "unit/models/test_limited_template.py::test_limited_template_that_fails_is_one_line",
        f"{FOLDERS}::test_template_without_end_is_one_line",
    ),
    "folder-sizes": (
        f"{FOLDER}::test_huge_small_file_is_not_read",
        f"{FOLDER}::test_huge_line_comes_in_parts",
        f"{FOLDERS}::test_reward_states_of_a_sparse_file_are_not_read",
        f"{FOLDERS}::test_policy_of_impossible_size_is_refused",
        "unit/models/test_shards.py::test_parts_that_overlap_or_leave_gaps_are_refused",
        f"{FOLDERS}::test_commands_under_a_limit_of_memory_end_with_a_line",
    ),
    "folder-parquet": (
        f"{PARQUET}::test_read_bomb_is_refused_in_little_memory",
        f"{PARQUET}::test_read_huge_bomb_is_refused_in_little_memory",
        f"{PARQUET}::test_read_damaged_bytes_are_refused_or_read",
        f"{FOLDERS}::test_parquet_bomb_is_a_note_of_the_page",
        f"{FOLDERS}::test_huge_rows_are_a_note_of_the_page",
    ),
    "folder-pages": (
        f"{REPORT}::test_page_hostile_text_adds_no_element",
        f"{REPORT}::test_page_hostile_run_name_adds_no_element",
        f"{REPORT}::test_page_policy_allows_own_style_only",
        f"{REPORT}::test_page_template_never_disables_escaping",
        f"{WATCH_PAGE}::test_page_hostile_text_is_shown_as_text",
        f"{WATCH_SERVER}::test_server_page_has_strict_policy_and_loads_nothing",
    ),
    "tool-network": (
        f"{PYTHON_TOOL}::test_code_has_no_network",
        f"{CONFINEMENT}::test_no_attempt_to_escape_works",
    ),
    "tool-read": (
        f"{PYTHON_TOOL}::test_code_escapes_by_no_attempt",
        f"{PYTHON_TOOL}::test_code_reaches_no_folder_of_another_completion",
        f"{ISOLATION}::test_readable_places_have_no_secrets_of_the_system",
    ),
    "tool-write": (
        f"{PYTHON_TOOL}::test_code_escapes_by_no_attempt",
        f"{PYTHON_TOOL}::test_files_are_kept_within_a_completion_only",
        f"{SANDBOX}::test_folders_are_removed",
    ),
    "tool-processes": (
        f"{CONFINEMENT}::test_no_attempt_to_escape_works",
        f"{CONFINEMENT}::test_attempts_to_escape_work_without_confinement",
    ),
    "tool-attempts": (
        f"{CONFINEMENT}::test_layer_stops_its_attempts_alone",
        f"{CONFINEMENT}::test_page_has_the_attempts_of_the_code",
        f"{PYTHON_TOOL}::test_code_escapes_by_no_attempt",
    ),
    "tool-reward": (
        f"{POLICY_CODE}::test_environment_is_no_ancestor_of_code",
        f"{POLICY_CODE}::test_code_that_has_taken_over_its_process_forges_no_reward",
        f"{POLICY_CODE}::test_code_that_is_ended_leaves_the_environment_and_its_score",
        f"{POLICY_CODE}::test_environment_reads_files_of_code_and_code_none_of_it",
    ),
    "tool-kernel": (
        f"{SECCOMP}::test_refused_calls_and_those_that_are_not_listed_fail",
        f"{SECCOMP}::test_calls_of_later_kernels_do_not_exist",
        f"{SECCOMP}::test_call_of_another_architecture_ends_the_process",
        f"{SECCOMP}::test_checked_call_is_decided_by_its_arguments",
    ),
    "tool-limits": (
        f"{CONFINEMENT}::test_limits_are_hard",
        f"{PYTHON_TOOL}::test_memory_is_limited",
        f"{PYTHON_TOOL}::test_processes_are_limited",
        f"{PYTHON_TOOL}::test_endless_output_ends_at_the_time_limit",
        f"{SANDBOX}::test_hostile_tools_at_once_end_alone_and_leave_no_process",
    ),
    "tool-sums": (
        f"{POLICY_CODE}::test_bombs_are_ended_and_leave_nothing",
        f"{POLICY_CODE}::test_bombs_are_harmless_under_larger_limits",
        f"{POLICY_CODE}::test_memory_that_processes_share_counts_once",
    ),
    "tool-variables": (f"{PYTHON_TOOL}::test_code_sees_no_secrets_of_the_environment",),
    "tool-results": (
        "unit/tools/test_template.py::test_neutralize_leaves_no_control_token",
        "unit/tools/test_template.py::test_neutralize_of_any_pieces_is_plain_at_any_length",
    ),
    "tool-verdict": (
        "unit/rewards/test_code_tests.py::test_wrong_or_hostile_program_passes_no_problem",
        "unit/rewards/test_code_tests.py::test_results_that_are_forged_or_cut_are_left_out",
    ),
    "level-required": (
        f"{PYTHON_TOOL}::test_code_does_not_run_where_it_cannot_be_confined",
        f"{ISOLATION}::test_required_is_refused_without_landlock",
        "integration/resilience/test_nodes.py::test_check_this_node_that_cannot_confine_code_has_an_issue",
    ),
    "level-best": (
        f"{PYTHON_TOOL}::test_code_runs_with_a_notice_where_it_cannot_be_confined_if_allowed",
        f"{ISOLATION}::test_best_goes_on_without_landlock_and_says_so",
        "unit/driver/preflight/test_tool_trial.py::test_level_of_isolation_is_a_notice",
    ),
    "level-none": (
        f"{PYTHON_TOOL}::test_code_is_not_confined_without_isolation",
        f"{ISOLATION}::test_none_confines_nothing",
    ),
    "level-trial": (
        f"{ISOLATION}::test_trial_notices_a_confinement_that_leaks",
        f"{ISOLATION}::test_confinement_in_which_nothing_runs_is_refused",
        f"{ISOLATION}::test_interpreter_that_cannot_run_confined_is_refused",
    ),
    "system-landlock": (f"{CONFINEMENT}::test_older_landlock_restricts_files_and_signals_too",),
    "system-user": (
        f"{CONFINEMENT}::test_no_attempt_of_another_user_works",
        f"{PYTHON_TOOL}::test_code_of_another_user_escapes_by_no_attempt",
    ),
    "system-containers": (
        f"{PYTHON_TOOL}::test_code_is_confined_where_namespaces_are_forbidden",
        f"{PYTHON_TOOL}::test_code_escapes_by_no_attempt_where_namespaces_are_forbidden",
    ),
    "system-namespaces": (f"{POLICY_CODE}::test_code_sees_no_other_process_and_no_shared_folder",),
    "system-aarch64": (f"{SECCOMP}::test_numbers_are_those_of_the_kernels_headers",),
    "system-others": (
        f"{CONFINEMENT}::test_system_without_landlock_is_refused",
        f"{CONFINEMENT}::test_machine_of_another_kind_is_refused",
    ),
    "own-limits": (
        f"{SANDBOX}::test_hostile_tools_at_once_end_alone_and_leave_no_process",
        f"{SANDBOX}::test_nothing_is_left_when_the_trainer_is_killed",
    ),
    "own-variables": (f"{SANDBOX}::test_tools_see_no_secrets_and_no_descriptors",),
    "own-supervisor": (
        f"{POLICY_CODE}::test_supervisor_has_no_secrets",
        f"{POLICY_CODE}::test_memory_of_supervisor_and_environment_is_hidden",
    ),
    "own-rewards": (
        f"{ISOLATED}::test_failure_costs_the_completions_of_its_problem_their_reward",
        f"{ISOLATED}::test_call_beyond_its_time_has_no_reward",
        f"{ISOLATED}::test_processes_of_the_function_end_with_it",
        "integration/rewards/test_isolated_run.py::test_run_goes_on_where_its_reward_fails",
        "integration/rewards/test_isolated_run.py::test_run_goes_on_where_its_reward_fails_and_is_exact_when_killed",
    ),
    "own-confine": (
        f"{PYTHON_TOOL}::test_own_tools_are_confined_if_the_user_wishes",
        f"{PYTHON_TOOL}::test_own_tools_are_trusted_otherwise",
    ),
    "remote-content": (f"{REMOTE}::test_request_has_code_and_limits_only",),
    "remote-here": (f"{REMOTE_POOL}::test_code_is_not_executed_here",),
    "remote-tls": (f"{REMOTE}::test_certificate_is_verified",),
    "remote-redirect": (f"{REMOTE}::test_redirect_is_refused",),
    "remote-token": (
        f"{REMOTE}::test_token_is_sent_and_hidden",
        f"{REMOTE}::test_token_in_the_reason_of_a_failure_is_hidden",
        f"{REMOTE_POOL}::test_completions_run_code_in_the_remote_sandbox",
        "unit/config/test_checks.py::test_config_remote_sandbox_that_cannot_work_is_refused",
    ),
    "remote-bounded": (
        f"{REMOTE}::test_service_that_does_not_answer_is_unreachable",
        f"{REMOTE}::test_response_above_the_limit_is_an_error_of_the_code",
        f"{REMOTE}::test_remote_long_output_is_bounded",
        f"{REMOTE}::test_malformed_response_is_unreachable_at_once",
    ),
    "remote-fault": (
        "unit/tools/test_turn_loop.py::test_unreachable_sandbox_ends_without_score_and_is_counted",
        f"{REMOTE_POOL}::test_failures_have_their_status_and_leave_the_process",
        "unit/telemetry/test_health.py::test_lost_completions_are_unscorable",
    ),
    "remote-trial": (
        "unit/driver/preflight/test_checks.py::test_check_remote_sandbox_runs_a_program_there",
        "unit/driver/preflight/test_checks.py::test_check_remote_sandbox_that_refuses_raises_one_line",
    ),
    "grading-processes": (
        f"{VERIFIER}::test_pool_item_over_limit_is_counted_as_timeout",
        f"{VERIFIER}::test_pool_workers_have_memory_limit_and_no_core_files",
        "fault_injection/test_hostile_answers.py::test_pool_hostile_corpus_costs_bounded_cpu_and_memory",
    ),
    "judge-tags": ("unit/rewards/test_judge.py::test_hostile_completion_stays_between_its_tags",),
    "reward-model-turns": (
        "unit/rewards/test_reward_models.py::test_completion_adds_no_turns_to_the_scored_conversation",
    ),
    "json-format": (
        "unit/rewards/test_json_format.py::test_json_format_exponential_text_earns_nothing_and_the_next_is_read",
    ),
    "grading-confined": (
        f"{VERIFIER}::test_pool_workers_are_confined_and_grade",
        f"{VERIFIER}::test_confined_worker_reads_libraries_and_writes_nothing",
        f"{VERIFIER}::test_prepare_confinement_that_is_impossible_is_reported",
        f"{VERIFIER}::test_prepare_confinement_in_which_nothing_grades_is_reported",
    ),
    "grading-corpus": (
        f"{VERIFIER}::test_pool_hostile_answers_get_their_rewards",
        "fault_injection/test_hostile_answers.py::test_pool_hostile_corpus_costs_bounded_cpu_and_memory",
    ),
    "grading-restart": (
        f"{VERIFIER}::test_pool_killed_worker_changes_no_verdict",
        f"{VERIFIER}::test_pool_killed_supervisor_changes_no_verdict",
    ),
    "text-code": ("unit/test_security.py::test_package_has_no_shell_and_no_unpickling",),
    "text-names": (
        "unit/test_security.py::test_describe_any_text_is_read_back_as_text",
        "unit/test_security.py::test_config_run_name_is_one_safe_folder_name_or_raises",
    ),
    "text-terminal": (
        f"{PROGRESS}::test_progress_file_control_characters_of_messages_are_written_out",
        f"{PROGRESS}::test_progress_file_has_no_control_characters",
    ),
    "text-pages": (
        f"{WATCH_PAGE}::test_page_hostile_messages_are_shown_as_text",
        "unit/pages/report/test_conversation_view.py::test_page_hostile_messages_add_no_element",
        "unit/text/test_display.py::test_safe_text_any_text_is_visible_and_short",
    ),
    "text-messages": (f"{NOTIFY}::test_notify_untrusted_text_is_bounded_without_secrets_mentions_and_escapes",),
    "text-calls": (
        "unit/tools/test_template.py::test_parse_of_anything_is_a_turn",
        "unit/tools/test_template.py::test_parse_of_deep_nesting_is_text",
        "unit/tools/test_template.py::test_message_of_a_call_that_cannot_be_read_is_text",
        "unit/tools/test_template.py::test_message_of_a_text_of_cubic_time_is_text",
        f"{TURNS}::test_reader_thousands_of_thoughts_are_not_read",
        f"{TURNS}::test_reader_text_of_cubic_time_is_not_read_and_the_next_is",
        f"{TURNS}::test_reader_nested_brackets_are_no_crash",
    ),
    "watch-loopback": (
        f"{WATCH_SERVER}::test_server_listens_on_loopback_only",
        f"{WATCH_SERVER}::test_server_foreign_host_name_is_refused",
        f"{WATCH_SERVER}::test_server_only_reads",
    ),
    "watch-bounded": (
        f"{WATCH_SERVER}::test_server_garbage_does_not_stop_it",
        f"{WATCH_SERVER}::test_server_connections_are_bounded_and_free_again",
    ),
    "endpoint-key": (
        f"{ENDPOINT}::test_requests_without_the_key_are_refused_before_their_body_is_read",
        f"{ENDPOINT}::test_keys_differ_and_none_is_shown",
        f"{ENDPOINT}::test_key_of_another_row_writes_into_that_rows_trajectory_only",
    ),
    "endpoint-bounded": (
        f"{ENDPOINT}::test_large_body_and_unknown_paths_are_refused",
        f"{ENDPOINT}::test_body_that_does_not_arrive_is_given_up",
        f"{ENDPOINT}::test_connections_are_limited",
        f"{ENDPOINT}::test_port_and_threads_end_with_the_call",
        f"{ENDPOINT}::test_client_that_sends_half_a_request_does_not_keep_the_endpoint_open",
    ),
    "token-file": (
        f"{TOKEN_FILE}::test_token_of_a_new_cluster_is_its_owners_alone",
        f"{TOKEN_FILE}::test_token_others_can_read_is_mended_once_and_reported",
        f"{TOKEN_FILE}::test_token_of_another_user_is_refused_if_everyone_can_read_it",
        f"{TOKEN_FILE}::test_token_that_is_a_fifo_does_not_block",
    ),
    "warm-start": (
        f"{WARM_START}::test_server_foreign_process_is_refused_before_it_is_read",
        f"{WARM_START}::test_servers_folder_is_its_owners_alone",
        f"{WARM_START}::test_client_of_a_workers_process_runs_plain_python",
        f"{WARM_START}::test_client_after_the_workers_began_runs_plain_python",
        "unit/driver/test_run_observers.py::test_build_observers_warm_start_ends_in_runs_with_tools",
    ),
    "compile-cache": (
        "unit/resilience/test_compile_cache.py::test_compile_cache_others_can_write_is_refused",
        "unit/resilience/test_compile_cache.py::test_compile_cache_of_others_is_refused",
        "unit/resilience/test_compile_cache.py::test_compile_cache_in_a_folder_others_can_write_is_refused",
        "unit/resilience/test_compile_cache.py::test_engine_issue_names_the_compile_cache",
    ),
    "cluster-aws": (
        "unit/test_templates.py::test_cluster_yaml_dashboard_is_local_and_needs_token",
        "integration/test_templates.py::test_ray_up_opens_port_22_only",
        "unit/test_templates.py::test_cluster_yaml_credentials_of_machines_need_a_session_token",
    ),
    "cluster-kubernetes": ("unit/test_templates.py::test_rayjob_is_closed_and_secrets_are_references",),
    "cluster-pods": (
        "unit/test_templates.py::test_rayjob_pods_are_restricted",
        "unit/test_templates.py::test_rayjob_loosened_pod_is_found",
        "unit/test_templates.py::test_rayjob_secret_others_can_read_is_found",
        "unit/test_templates.py::test_rayjob_only_the_autoscaler_has_the_accounts_token",
    ),
    "secrets-files": (
        f"{REDACTION}::test_secret_in_any_field_is_never_written",
        "integration/driver/test_secrets_run.py::test_planted_secrets_are_in_nothing_that_a_run_writes",
        f"{REDACTION}::test_fields_of_the_property_test_are_all_that_hold_text",
        f"{REPORT}::test_page_shows_no_credential",
    ),
    "secrets-messages": (
        f"{REDACTION}::test_error_message_hides_secrets_after_pickling",
        f"{REDACTION}::test_command_that_fails_shows_no_secret",
        f"{REDACTION}::test_traceback_of_command_shows_no_secret",
        f"{PROGRESS}::test_progress_terminal_output_of_other_code_is_redacted",
    ),
    "secrets-tokens": ("unit/pages/watch/test_rollouts.py::test_detail_tokens_that_spell_a_secret_are_left_out",),
    "secrets-hub": ("integration/export/test_hub.py::test_push_refused_token_is_one_line_without_it",),
    "secrets-notify": (
        f"{NOTIFY}::test_notify_address_is_hidden_in_the_config",
        f"{NOTIFY}::test_notify_unreachable_server_shows_one_line_without_the_address",
    ),
    "secrets-time": (f"{REDACTION}::test_redact_text_hostile_length_is_linear",),
}
"""Promise -> the tests that show it."""

CLAIMS = re.compile(
    r"withstand|no network[,.]|\bhostile|isolated|untrusted|never unpickled|\bconfined\b|stranger", re.IGNORECASE
)
"""Words with which pages make claims of security."""
HISTORY = ("CHANGELOG.md",)
"""Pages that describe changes, not the present."""


def promises() -> dict[str, str]:
    """Return the promises of the page by their names."""
    return {name: text for _, name, text in PROMISE.findall(PAGE.read_text())}


@cache
def names_of_tests(path: Path) -> frozenset[str]:
    """Return the names of a file's tests, as `test_name` or `Class::test_name`, by its source."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + each.name for each in inner if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


def test_each_promise_has_tests_and_each_entry_a_promise() -> None:
    assert list(promises()) == list(TESTS)
    assert all(TESTS.values())


@pytest.mark.parametrize("promise", TESTS)
def test_tests_of_a_promise_exist(promise: str) -> None:
    missing = []
    for test in TESTS[promise]:
        file, _, name = test.partition("::")
        path = ROOT / "tests" / file
        if not path.is_file() or name not in names_of_tests(path):
            missing.append(test)
    assert missing == []


def test_rows_of_promises_are_well_formed() -> None:
    """Every row of a table that begins with `promise` has an anchor of its own, equal to its name."""
    text = PAGE.read_text()
    rows = re.findall(r"^\| promise \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    lines = [line for table in rows for line in table.splitlines()]
    names = [(anchor, name) for anchor, name, _ in PROMISE.findall(text)]
    assert len(lines) == len(names) == len(set(names))
    assert all(anchor == name for anchor, name in names)


def test_pages_with_claims_of_security_link_to_this_one() -> None:
    pages = [page for page in PAGES if page != PAGE and page.name not in HISTORY]
    claiming = [page.name for page in pages if CLAIMS.search(page.read_text())]
    linking = [page.name for page in pages if "security.md" in page.read_text()]
    assert claiming
    assert [name for name in claiming if name not in linking] == []


def test_security_policy_names_no_address() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert "@" not in text and "private vulnerability reporting" in text
