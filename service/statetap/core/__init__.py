"""Pure decisions: what to place where, what a capture is, what happens next. Standard library only; no clock, no I/O."""
