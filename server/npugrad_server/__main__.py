"""`python -m npugrad_server`: the command `npugrad-server`."""

from __future__ import annotations

from npugrad_server.cli import main

if __name__ == "__main__":
    main()
