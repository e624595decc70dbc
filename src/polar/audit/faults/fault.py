"""One known way to lose or to spoil tokens."""

from msgspec import Struct


class Fault(Struct, frozen=True):
    """What goes wrong, what notices it, what becomes of it, and the tests that inject it.

    Attributes:
        detectors: dotted names of the code that notices it, or what it is called where it shows: `finding X`, `excluded X`,
            `fork X`, `unserved X`, `normaliser X`, `self-test X`, `status N`.
        tests: pytest's ids without parameters.
    """

    id: str
    says: str
    detectors: tuple[str, ...]
    handling: str
    tests: tuple[str, ...]


SAMPLED = "tests/gateway/test_calls.py::test_tokens_that_cannot_be_trusted_fail_the_call_and_are_counted"
DAMAGED = "tests/audit/test_run.py::test_what_was_changed_is_found"
MISBUILT = "tests/audit/test_run.py::test_an_error_of_the_builders_is_found"
