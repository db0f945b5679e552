"""Entry of a worker process that knows the synthetic operator and no other."""

from __future__ import annotations

import sys

from tests.synthetic.record import RECORDS

from npugrad_server.worker.__main__ import main
from npugrad_server.worker.descendants import leave

if __name__ == "__main__":
    status = main(sys.argv[1:], RECORDS)
    sys.stderr.flush()
    leave(status)
