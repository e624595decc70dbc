"""Which task comes when, and what of a run's sessions is trained."""

from pathlib import Path

from msgspec import structs

from polar.cli.runs import Run
from polar.rollout.folder import RunFolder
from polar.specs import Task
from polar.training.config import RolloutSpec
from polar.training.rollouts import GroupRecord, Order, busy_seconds, read_forests, recorded
from tests.audit.folders import make_run

TASKS = [Task(f"t{number}", "do it") for number in range(5)]


def test_all_tasks_come_before_any_comes_again_each_time_in_another_order() -> None:
    order = Order(TASKS, seed=3, group_size=4)
    places = [order.place(number) for number in range(15)]
    passes = [[place.task.id for place in places[start : start + 5]] for start in (0, 5, 10)]
    assert [sorted(each) for each in passes] == [["t0", "t1", "t2", "t3", "t4"]] * 3
    assert len({tuple(each) for each in passes}) > 1
    assert [place.first for place in places] == [0] * 5 + [4] * 5 + [8] * 5, "samples go on where the last visit ended"
    assert [Order(TASKS, 3, 4).place(number).task.id for number in range(15)] == [place.task.id for place in places]
    assert [Order(TASKS, 4, 4).place(number).task.id for number in range(15)] != [place.task.id for place in places]


def test_forests_come_from_the_store_and_a_session_without_a_reward_has_nothing(tmp_path: Path, smollm2_dir: Path) -> None:
    folder: RunFolder = make_run(tmp_path / "run", smollm2_dir)
    results = [result for result in Run.read(folder.path).results if result.reward is not None]
    lost = structs.replace(results[0], session_id="gone", reward=None)
    forests = read_forests(folder, [results[0], lost], RolloutSpec())
    assert forests[0].session_ids == (results[0].session_id,)
    assert forests[0].loss_mask.sum() == results[0].accounting.trained
    assert not forests[1].loss_mask.any()
    (group,) = recorded(folder, [GroupRecord("t", 0, (results[0].session_id,))], RolloutSpec())
    assert group.samples[0].forest.session_ids == forests[0].session_ids


def test_the_engine_was_busy_while_a_call_was_with_it(tmp_path: Path, smollm2_dir: Path) -> None:
    folder = make_run(tmp_path / "run", smollm2_dir)
    sessions = [result.session_id for result in Run.read(folder.path).results]
    whole = busy_seconds(folder, sessions, 0.0, 1e12)
    assert whole > 0
    assert busy_seconds(folder, sessions * 2, 0.0, 1e12) == whole, "calls at the same time count once"
    assert busy_seconds(folder, sessions, 0.0, 1.0) == 0
