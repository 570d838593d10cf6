"""The unit machine with the shell's moves as methods, and the commands that the tests expect of it."""

from statetap.core import unit_messages as msg
from statetap.core.capture import Refusal, RefusalReason
from statetap.core.records import SampleStatus, SampleVerdict, ShardObject
from statetap.core.requests import RequestName
from statetap.core.spec import Identity
from statetap.core.unit import UnitKey, UnitMachine, UnitSample

from tests.unit.core.dump_facts import expected, plugin_dump

ROWS = 10
OBJECTS = (ShardObject(key="aux_hidden_states/c/0/0/0", nbytes=4096),)
OLD = RequestName("j", 3, 0, 1, 1).rid
OLDER = RequestName("j", 3, 0, 1, 0).rid


class Unit(UnitMachine):
    """A unit machine with the shell's moves as methods."""

    def __init__(self, *, samples=1, attempts=3):
        wanted = [UnitSample(i, expected(ROWS + i)) for i in range(samples)]
        super().__init__(UnitKey("j", 3, 2), wanted, attempts_per_sample=attempts)

    def ask(self, sample=0, *, worker="gpu0", identity=Identity.TOKENS, chunk=None, probation=False):
        (sent,) = self.handle(msg.Assigned(sample, worker, identity, chunk, probation))
        assert (sent.sample, sent.worker) == (sample, worker)
        return sent.rid

    def answer(self, rid, *, tokens=None, cached=0, next_token=5, named=None):
        rows = ROWS + RequestName.parse(rid).sample if tokens is None else tokens
        return self.handle(msg.RequestAnswered(rid, rows, cached, next_token, named))

    def publish(self, rid, dump):
        return self.handle(msg.DumpPublished(rid, dump))

    def whole(self, rid, dump_id="d"):
        """Publish the whole capture in one dump."""
        return self.publish(rid, plugin_dump(dump_id, 0, ROWS + RequestName.parse(rid).sample, rid=rid))

    def inspect(self, rid, *, digest=99, refusal=None, reason=RefusalReason.BAD_VALUES):
        found = None if refusal is None else Refusal(reason, refusal)
        return self.handle(msg.CaptureInspected(rid, digest, found))

    def capture(self, sample=0, **asked):
        rid = self.ask(sample, **asked)
        self.answer(rid)
        self.whole(rid, f"d{sample}")
        self.inspect(rid)
        return rid

    def reason(self, sample=0):
        return self.verdicts()[sample].reason


def stored(sample, attempts, worker, next_token, digest):
    return SampleVerdict(
        sample=sample,
        status=SampleStatus.STORED,
        reason=None,
        attempts=attempts,
        worker=worker,
        next_token=next_token,
        digest=digest,
    )


def lost(sample, reason, attempts, worker):
    return SampleVerdict(sample=sample, status=SampleStatus.FAILED, reason=reason, attempts=attempts, worker=worker)


def failed(rid, reason, *, sample=0, worker="gpu0", final=False, fault=msg.Fault.ATTEMPT):
    return msg.AttemptFailed(rid, sample, worker, reason, final, fault)


def stray(*dump_ids):
    return msg.ReleaseDumps(dump_ids, stray=True)
