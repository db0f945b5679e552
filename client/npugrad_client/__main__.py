"""`python -m npugrad_client`: the command `npugrad`."""

from __future__ import annotations

from npugrad_client.cli import main

if __name__ == "__main__":
    main()
