"""Entry of a server that serves the synthetic operator and no other: `npugrad-server` with other records."""

from __future__ import annotations

from functools import partial

from tests.synthetic.record import REGISTRY

from npugrad_server import cli
from npugrad_server.app import serve

if __name__ == "__main__":
    # The command line as it is; only what it serves is another.
    other = partial(serve, registry=REGISTRY, worker_module="tests.synthetic.worker")
    setattr(cli, "serve_until_ended", other)  # noqa: B010
    cli.main()
