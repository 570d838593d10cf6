"""Dumps as core sees them, for the tests of core: facts without any bytes of hidden states."""

from array import array

from statetap.core.capture import Expected
from statetap.core.dumps import DumpFacts
from statetap.core.spec import CaptureSpec, Final, HiddenArray

CAPTURE = CaptureSpec((1, 3, 5), Final.POST_NORM)
FINGERPRINT = "weights-1"
ARRAYS = (HiddenArray("aux_hidden_states", (3, 8), "bfloat16"), HiddenArray("last_hidden_states", (8,), "bfloat16"))


def token_bytes(ids):
    return array("i", ids).tobytes()


def tensors(rows, arrays=ARRAYS):
    return tuple((a.name, a.dtype, (rows, *a.row_shape)) for a in arrays)


def expected(rows):
    """A sample of the token ids 100, 101, …"""
    return Expected(token_bytes(range(100, 100 + rows)), ARRAYS, CAPTURE, FINGERPRINT)


def plugin_dump(dump_id, start, stop, *, rid="rid", prompt=None, generation=0, ids=None, **other):
    """Rows `[start, stop)` of the sample that `expected` makes, unless `ids` says otherwise."""
    rows = stop - start
    return DumpFacts(
        dump_id=dump_id,
        sequence=other.pop("sequence", 0),
        rows=rows,
        nbytes=4096,
        tensors=other.pop("tensors", tensors(rows)),
        capture=other.pop("capture", CAPTURE),
        model_fingerprint=other.pop("model_fingerprint", FINGERPRINT),
        rid=rid,
        prefix_len=start,
        prompt_len=prompt,
        retraction_count=generation,
        token_ids=token_bytes(range(100 + start, 100 + stop) if ids is None else ids),
        name=other.pop("name", f"tap/{dump_id}"),
        **other,
    )


def plain_dump(dump_id, sequence, rows, **other):
    return DumpFacts(
        dump_id=dump_id,
        sequence=sequence,
        rows=rows,
        nbytes=4096,
        tensors=other.pop("tensors", tensors(rows)),
        capture=other.pop("capture", CAPTURE),
        model_fingerprint=other.pop("model_fingerprint", FINGERPRINT),
    )
