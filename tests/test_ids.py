"""Identifiers that Polar mints."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.ids import (
    new_call_id,
    new_model_key,
    new_session_id,
    parse_minted,
    parse_response_id,
    response_id,
    signature,
    tool_call_id,
)


@given(st.integers(0, 10**6), st.integers(0, 15), st.integers(0, 99))
def test_a_tool_call_id_names_its_call_and_fits_every_dialect(ordinal: int, choice: int, index: int) -> None:
    call_id = new_call_id(ordinal)
    value = tool_call_id(call_id, choice, index)
    assert parse_minted(value) == (call_id, choice)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}", value)


@given(st.integers(0, 10**6), st.integers(0, 15))
def test_signatures_and_response_ids_name_their_call(ordinal: int, choice: int) -> None:
    call_id = new_call_id(ordinal)
    assert parse_minted(signature(call_id, choice)) == (call_id, choice)
    assert parse_response_id(response_id(call_id)) == call_id
    assert parse_response_id(tool_call_id(call_id, 0, 0)) == ""


@given(st.text())
def test_any_other_text_names_no_call(value: str) -> None:
    assert parse_minted(value) is None


@pytest.mark.parametrize(
    "value",
    [
        "call_c1aaaaaaaa_0",
        "call_c1aaaaaaaa_0_0 ",
        "call_c1aaaaaaaa_0_0\n",
        "Call_c1aaaaaaaa_0_0",
        "call_c1aaaaaaaa_-1_0",
        "call_caaaaaaaaa_0_0",
        "call_c١aaaaaaaa_0_0",
        "call_c1aaaaaaaa_٠_0",
        f"call_c1aaaaaaaa_{'9' * 5000}_0",
        "cG9sYXIvYzFhYWFhYWFhLzA=",
        "cG9sYXIvYzFhYWFhYWFhYS8w\n",
    ],
)
def test_what_nearly_looks_like_ours_is_not(value: str) -> None:
    assert parse_minted(value) is None


def test_ids_are_unique_and_sessions_sort_by_time() -> None:
    sessions = [new_session_id() for _ in range(200)]
    assert len(set(sessions)) == 200
    assert [value[:9] for value in sessions] == sorted(value[:9] for value in sessions)
    assert len({new_call_id(0) for _ in range(1000)}) == 1000


def test_a_model_key_is_safe_in_a_path_and_in_a_header() -> None:
    keys = {new_model_key() for _ in range(200)}
    assert len(keys) == 200
    assert set("".join(keys)) <= set(string.ascii_letters + string.digits + "-_")
    assert all(len(key) >= 3 + 192 // 6 for key in keys)
