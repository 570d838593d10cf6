"""The outside world, one folder per port. Adapters do not know each other: `main` wires them."""
