"""Advantages, each against its formula written out."""

import numpy as np
import pytest

from polar.training.advantages import advantages
from polar.training.config import Advantage

REWARDS = np.asarray([1.0, 0.0, 0.0, 0.5])


def test_mean_std_is_in_standard_deviations_of_the_group() -> None:
    assert advantages(REWARDS, "mean_std") == pytest.approx((REWARDS - 0.375) / np.std(REWARDS), abs=1e-5)


def test_mean_keeps_the_size_of_rewards() -> None:
    assert advantages(REWARDS, "mean").tolist() == (REWARDS - 0.375).tolist()


def test_leave_one_out_holds_each_against_the_others() -> None:
    others = [np.mean(np.delete(REWARDS, each)) for each in range(4)]
    assert advantages(REWARDS, "leave_one_out") == pytest.approx(REWARDS - others)


@pytest.mark.parametrize("kind", ["mean_std", "mean", "leave_one_out"])
@pytest.mark.parametrize("rewards", [[], [1.0], [0.1] * 7])
def test_equal_rewards_are_worth_exactly_nothing(kind: Advantage, rewards: list[float]) -> None:
    assert advantages(np.asarray(rewards, np.float64), kind).tolist() == [0.0] * len(rewards)
