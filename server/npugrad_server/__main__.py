"""`npugrad-server` and `python -m npugrad_server`: the command, if the contract is of its version."""

from __future__ import annotations

import sys

import npugrad
from npugrad_server import __version__


def main() -> None:
    """Entry point of the command; exit status 1 where `npugrad` is of another version."""
    if npugrad.__version__ != __version__:
        sys.exit(
            f"npugrad-server {__version__} needs npugrad {__version__}, but npugrad {npugrad.__version__} is "
            "installed: "
            f"pip install npugrad=={__version__} npugrad-server=={__version__}"
        )
    from npugrad_server.cli import main as run  # here, as it imports names that another version may lack

    run()


if __name__ == "__main__":
    main()
