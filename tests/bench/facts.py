"""What the stand-ins and the service that drives them are both told."""

from __future__ import annotations

MODEL = "org/stand-in"
FINGERPRINT = "fingerprint"
LAYERS = (1, 3, 5)
FINAL = "post_norm"
NUM_LAYERS = 8
VOCAB_SIZE = 1000
CONTEXT_LENGTH = 16384
PLAIN_DIR = "plain"
READY = "stand_ins.ready"


def worker_names(count: int) -> list[str]:
    return [f"w{number}" for number in range(count)]


def boot_of(worker: str) -> str:
    """Its boot id: a stand-in starts once."""
    return f"boot{worker}"
