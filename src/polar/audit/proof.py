"""What checking a session came to: what does not hold, of how much it was checked at all, and the tokens counted again."""

from dataclasses import dataclass, field

from polar.specs import Accounting, Finding


@dataclass(frozen=True)
class Proof:
    """Findings and coverage.

    Attributes:
        findings: what does not hold.
        checked: of how many of its units each claim was checked; a claim that is not named was not checked.
        counted: the accounting as the audit counts it; empty where it cannot.
    """

    findings: list[Finding]
    checked: dict[str, int] = field(default_factory=dict)
    counted: Accounting = field(default_factory=Accounting)

    def __add__(self, other: "Proof") -> "Proof":
        return Proof(self.findings + other.findings, self.checked | other.checked, self.counted + other.counted)
