"""The scripts of bench/ import one another by name."""

import sys

from tests.rehearsals import BENCH

sys.path.insert(0, str(BENCH))
