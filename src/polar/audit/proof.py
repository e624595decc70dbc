"""What checking a session came to: what does not hold, and of how much it was checked at all."""

from dataclasses import dataclass, field

from polar.specs import Finding


@dataclass(frozen=True)
class Proof:
    """Findings and coverage.

    Attributes:
        findings: what does not hold.
        checked: of how many of its units each claim was checked; a claim that is not named was not checked.
    """

    findings: list[Finding]
    checked: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: "Proof") -> "Proof":
        return Proof(self.findings + other.findings, self.checked | other.checked)
