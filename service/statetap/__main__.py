"""`python -m statetap`: the command line, with the service's own commands."""

from __future__ import annotations

from statetap_client.cli import main

if __name__ == "__main__":
    main()
