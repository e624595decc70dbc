"""How token capture goes wrong: every fault that is known.

`python -m polar.audit.faults docs/faithfulness.md` writes them there as a table. A test sees to it that each detector named
here is in the code, and that each test is there.
"""

from polar.audit.faults.calls import CALLS
from polar.audit.faults.fault import Fault
from polar.audit.faults.logprobs import LOGPROBS
from polar.audit.faults.tokens import TOKENS
from polar.audit.faults.weights import WEIGHTS

FAULTS: tuple[Fault, ...] = (*TOKENS, *LOGPROBS, *CALLS, *WEIGHTS)
