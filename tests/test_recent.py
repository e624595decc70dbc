from polar.recent import Recent


def test_what_is_asked_for_stays_and_what_is_not_is_forgotten_in_the_end() -> None:
    recent: Recent[str, int] = Recent(capacity=10)
    recent.keep("used", 1, 4)
    recent.keep("unused", 2, 4)
    for number in range(20):
        if recent.get("used") is None:
            assert recent.older("used") == 1
        recent.keep(f"other {number}", number, 4)
    assert recent.get("unused") is None
    assert recent.older("unused") is None


def test_it_holds_two_generations_at_most() -> None:
    recent: Recent[int, bytes] = Recent(capacity=100)
    for number in range(1000):
        recent.keep(number, bytes(10), 10)
        assert recent.held <= 200
    assert recent.held >= 100


def test_what_was_kept_is_given_back() -> None:
    recent: Recent[str, int] = Recent(capacity=10)
    assert recent.keep("one", 1, 100) == 1
    assert recent.get("one") == 1
    assert recent.older("nothing") is None
