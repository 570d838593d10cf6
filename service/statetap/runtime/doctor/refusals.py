"""What to do about a capture that was refused, by the reason."""

from __future__ import annotations

from collections.abc import Mapping

from statetap.core.capture import RefusalReason

_FOREIGN = "see that nobody else sends prompts to this server, and that no other server publishes in this directory"
_ANOTHER = "do not use this worker: its dumps are not what its tap says; end it, and start it with one version of statetap-sglang"

_WAYS_OUT: Mapping[RefusalReason, str] = {
    RefusalReason.MISSING_ROWS: (
        "see that the URL and the dump directory are of the same server; that both see one /dev/shm (containers: --ipc, or one "
        "volume); and that the server's log has no error of its publisher"
    ),
    RefusalReason.LOST_BY_PUBLISHER: "see to the reason that the publisher gives; its log has more",
    RefusalReason.PREFIX_CACHED: (
        "start the server with --disable-radix-cache: its cache does not keep requests of different extra_key apart"
    ),
    RefusalReason.WRONG_TENSORS: (
        "the dumps hold other tensors than announced: correct what is declared (aux_layer_ids, final, hidden_size, dtype), or "
        "the server's patch"
    ),
    RefusalReason.WRONG_CAPTURE: _ANOTHER,
    RefusalReason.WRONG_TOKENS: _ANOTHER,
    RefusalReason.WRONG_PROMPT_LENGTH: _ANOTHER,
    RefusalReason.OVERLAP: _ANOTHER,
    RefusalReason.UNNAMED_DUMP: "two servers publish in this directory: give each a name of its own (STATETAP_PLUGIN_WORKER)",
    RefusalReason.AMBIGUOUS: _FOREIGN,
    RefusalReason.BAD_VALUES: "do not use this worker; try the model in another dtype: float16 overflows where bfloat16 does not",
    RefusalReason.WRONG_CHECKSUM: "do not use this worker: its buffers change before they are published; report its flags",
}


def way_out(reason: RefusalReason) -> str:
    return _WAYS_OUT.get(reason, "look into the server's log")
