"""`python -m statetap.telemetry`: print the page about log events."""

import sys

from statetap.telemetry.document import log_events_page

sys.stdout.write(log_events_page())
