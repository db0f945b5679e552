"""`python -m tests.cann_sim NAME` makes one of the mistakes in `scenarios` and must not live to tell."""

from __future__ import annotations

import sys

from tests.cann_sim.scenarios import main

main(sys.argv[1])
