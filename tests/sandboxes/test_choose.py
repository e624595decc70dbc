"""Which kind of sandbox one gets."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from polar.errors import UsageError
from polar.sandboxes import bubblewrap, choose
from tests.sandboxes.conftest import need_bubblewrap


@pytest.fixture
def no_bwrap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bubblewrap, "SEARCH_PATH", "/nowhere")
    bubblewrap.problem.cache_clear()
    yield
    bubblewrap.problem.cache_clear()


def test_auto_is_bubblewrap_where_it_works(tmp_path: Path) -> None:
    need_bubblewrap()
    assert bubblewrap.problem() == ""
    assert choose("auto", tmp_path).kind == "bubblewrap"
    assert choose("process", tmp_path).kind == "process"


@pytest.mark.usefixtures("no_bwrap")
def test_auto_is_process_where_it_does_not_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert choose("auto", tmp_path).kind == "process"
    assert "bwrap is not installed" in caplog.text


@pytest.mark.usefixtures("no_bwrap")
def test_bubblewrap_is_refused_where_it_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"bwrap is not installed.*apt-get install bubblewrap"):
        choose("bubblewrap", tmp_path)
