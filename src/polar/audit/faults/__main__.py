"""Writes the table of faults into a document."""

import sys
from pathlib import Path

from polar.audit.faults.table import written

document = Path(sys.argv[1])
document.write_text(written(document.read_text()))
