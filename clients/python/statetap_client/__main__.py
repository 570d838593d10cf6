"""`python -m statetap_client` is the command `statetap`."""

from statetap_client.cli import main

main()
