"""Entry point of `npugrad-server` and `python -m npugrad_server`; checks the version of `npugrad` first."""

from __future__ import annotations

import sys

import npugrad
from npugrad_server import __version__


def main() -> None:
    """Runs the command; exits with status 1 if the installed `npugrad` has another version."""
    if npugrad.__version__ != __version__:
        sys.exit(
            f"npugrad-server {__version__} needs npugrad {__version__}, but npugrad {npugrad.__version__} is "
            "installed: pip install . ./server in a checkout of one of them"
        )
    from npugrad_server.cli import main as run  # late: another version may lack names it needs

    run()


if __name__ == "__main__":
    main()
