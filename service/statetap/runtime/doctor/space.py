"""Bytes: what a token takes, what the budget holds, and whether shared memory and the memory limit hold the budget."""

from __future__ import annotations

from statetap.core.spec import CaptureSpec
from statetap.runtime.doctor.findings import Finding, error, note, ok, warning
from statetap.runtime.doctor.inputs import Announced, DirectoryFacts, capture_of, row_bytes
from statetap.runtime.dump_space import USABLE_BUDGET

SAMPLES = 1_000
SAMPLE_TOKENS = 2_000
# A server needs memory for itself, too: its weights pass through it, and its tokenizer and its workers live in it.
USABLE_MEMORY = 0.8


def examine_space(announced: Announced, directory: DirectoryFacts, budgets: int) -> list[Finding]:
    """`budgets` is what the worker's taps may hold together, in bytes."""
    return [
        _estimate(announced, capture_of(announced)),
        _capacity(announced),
        _shared_memory(directory, budgets),
        _memory_limit(directory, budgets),
    ]


def _estimate(announced: Announced, capture: CaptureSpec) -> Finding:
    per_token = row_bytes(announced)
    states = len(capture.aux_layer_ids) + {"both": 2, "none": 0}.get(capture.final, 1)
    total = per_token * SAMPLES * SAMPLE_TOKENS
    return ok(
        "bytes",
        f"{per_token:,} bytes a token ({states} states of {announced.hidden_size:,} in {announced.dtype}); "
        f"{SAMPLES:,} samples of {SAMPLE_TOKENS:,} tokens take {size(total)}",
    )


def _capacity(announced: Announced) -> Finding:
    tokens = int(announced.budget_bytes * USABLE_BUDGET) // row_bytes(announced)
    seen = f"{size(announced.budget_bytes)} hold {tokens:,} tokens of dumps that are not stored yet"
    longest = announced.context_length
    if longest is not None and tokens < longest:
        return warning(
            "budget",
            f"{seen}, and the server takes prompts of {longest:,}: longer samples than {tokens:,} tokens are refused",
            "raise STATETAP_PLUGIN_BUDGET_BYTES (plain dumps: budget_bytes), or capture fewer layers",
        )
    return ok("budget", seen)


def _shared_memory(directory: DirectoryFacts, budgets: int) -> Finding:
    room = directory.free_bytes + directory.held_bytes
    seen = f"{directory.filesystem}, {size(directory.total_bytes)}, of which {size(room)} are free or hold this worker's dumps"
    enlarge = "enlarge it (mount -o remount,size=…; docker run --shm-size), or lower the budget"
    if budgets > directory.total_bytes:
        return error("shared_memory", f"{seen}; the budget is {size(budgets)}", enlarge)
    if budgets > room:
        return warning("shared_memory", f"{seen}; the budget is {size(budgets)}", f"{enlarge}, or remove what else is in it")
    if directory.filesystem != "tmpfs":
        return warning(
            "shared_memory",
            f"{seen}: not a tmpfs, so every dump goes to a disk first",
            "put the dump root below /dev/shm, or on another tmpfs",
        )
    return ok("shared_memory", seen)


def _memory_limit(directory: DirectoryFacts, budgets: int) -> Finding:
    limit = directory.memory_limit_bytes
    if limit is None:
        return note("memory", "the server's memory limit cannot be read from here")
    seen = f"the server may use {size(limit)} of memory; dumps count, up to the budget of {size(budgets)}"
    lower = "lower the budget (STATETAP_PLUGIN_BUDGET_BYTES), or raise the memory limit of the server's container"
    if budgets > limit:
        return error("memory", f"{seen}: it would be killed before the budget is used up", lower)
    if budgets > limit * USABLE_MEMORY:
        return warning("memory", f"{seen}, which leaves the server itself {size(limit - budgets)}", lower)
    return ok("memory", seen)


def size(nbytes: float) -> str:
    """Bytes in decimal units, as the client's tables have them."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"
