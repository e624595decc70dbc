"""Sessions whose records do not go together are refused, for whatever is built reaches the loss."""

import numpy as np
import pytest
from msgspec import structs

from polar.errors import CaptureError
from polar.specs import VersionSpan
from polar.tokens.records import Node, Position
from polar.trajectory.builders import Captured, build
from tests.tokens.sessions import Session
from tests.trajectory.test_builders import built, say, start


def damaged(session: Session, **changes: object) -> Captured:
    """The session with its last node changed, as a damaged file would give it."""
    *nodes, last = session.history.tree.nodes
    fields = {name: getattr(last, name) for name in last.__dataclass_fields__}
    return Captured(session.calls, [*nodes, Node(**{**fields, **changes})], session.messages, session.tools)


@pytest.mark.parametrize(
    "versions",
    [(), (VersionSpan(0, 3, 1),), (VersionSpan(1, 4, 1),), (VersionSpan(0, 2, 1), VersionSpan(3, 4, 2)), (VersionSpan(0, 5, 1),)],
)
def test_a_token_without_a_version_stops_the_build(versions: tuple[VersionSpan, ...]) -> None:
    session, talk = Session(), start()
    say(session, talk, "one")
    with pytest.raises(CaptureError, match="W01"):
        build(damaged(session, versions=versions), builder="prefix_merging", status="completed", reward=1.0)


def test_a_token_that_was_sampled_and_is_not_there_stops_the_build() -> None:
    session, talk = Session(), start()
    call = say(session, talk, "one")
    session.calls[0] = structs.replace(call, sampled=call.sampled + 1)
    with pytest.raises(CaptureError, match="T08.*sampled 5 tokens, 4 are stored"):
        built(session)


def test_a_token_too_few_in_one_call_is_not_made_up_by_one_too_many_in_another() -> None:
    session, talk = Session(), start()
    one, two = say(session, talk, "one"), say(session, talk, "two")
    session.calls = [structs.replace(one, sampled=one.sampled + 1), structs.replace(two, sampled=two.sampled - 1)]
    with pytest.raises(CaptureError, match="T08"):
        built(session)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.5, -9999.0])
def test_a_number_that_is_no_log_probability_stops_the_build(value: float) -> None:
    session, talk = Session(), start()
    say(session, talk, "one")
    values = np.asarray([-1, -1, value, -1], np.float32)
    with pytest.raises(CaptureError, match=r"L02: call c0abcdefgh has log-probability .* token 2 of 4"):
        build(damaged(session, logprobs=values), builder="prefix_merging", status="completed", reward=1.0)


@pytest.mark.parametrize("version", [-1, 2**31])
def test_a_version_that_files_cannot_hold_stops_the_build(version: int) -> None:
    session, talk = Session(), start()
    say(session, talk, "one")
    with pytest.raises(CaptureError, match="W01"):
        build(damaged(session, versions=(VersionSpan(0, 4, version),)), builder="prefix_merging", status="completed", reward=1.0)


def test_a_call_that_names_another_ones_tokens_stops_the_build() -> None:
    """Else an aborted answer were trained in the place of one as long, and the sums would hold."""
    session, talk = Session(), start()
    aborted, asked = say(session, talk, "one", status="aborted"), say(session, talk, "two")
    session.calls[1] = structs.replace(asked, choices=(structs.replace(asked.choices[0], node=aborted.choices[0].node),))
    with pytest.raises(CaptureError, match="choice 0 of call c0abcdefgh"):
        built(session)


def test_an_answer_that_does_not_begin_at_its_prompts_end_stops_the_build() -> None:
    session, talk = Session(), start()
    one, two = say(session, talk, "one"), say(session, talk, "two")
    session.calls[1] = structs.replace(two, prompt=one.prompt)
    with pytest.raises(CaptureError, match="does not begin where the prompt ends"):
        built(session)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"node_id": 7}, "node 7 under 0"),
        ({"parent": Position(5, 0)}, "node 1 under 5"),
        ({"parent": Position(0, 1000)}, "hangs at token 1000 of node 0"),
        ({"kind": "context", "logprobs": None}, "call c0abcdefgh has node 1, and there is no such whole sampled node"),
        ({"logprobs": np.zeros(1, np.float32)}, "call c0abcdefgh has node 1, and there is no such whole sampled node"),
    ],
)
def test_a_damaged_tree_stops_the_build_by_name(changes: dict[str, object], said: str) -> None:
    session = Session()
    say(session, start(), "one")
    with pytest.raises(CaptureError, match=f"^tree: the token tree of session s1 is damaged: .*{said}"):
        build(damaged(session, **changes), builder="prefix_merging", status="completed", reward=1.0)


def test_a_call_whose_place_is_not_there_stops_the_build() -> None:
    session, talk = Session(), start()
    say(session, talk, "one")
    say(session, talk, "two")
    captured = session.captured()
    for nodes in (captured.nodes[:-1], captured.nodes[:1]):
        with pytest.raises(CaptureError, match="^tree: .* and there is no"):
            build(
                Captured(captured.calls, nodes, captured.messages, captured.tools),
                builder="prefix_merging",
                status="completed",
                reward=1.0,
            )
    for place in (Position(-2, 0), Position(-1, 1), Position(99, 0), Position(0, 1000)):
        calls = [structs.replace(captured.calls[0], prompt=place), captured.calls[1]]
        with pytest.raises(CaptureError, match="^tree: .* and there is none"):
            build(
                Captured(calls, captured.nodes, captured.messages, captured.tools),
                builder="prefix_merging",
                status="completed",
                reward=1.0,
            )
