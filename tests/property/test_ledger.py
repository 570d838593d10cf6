"""The SQL ledger against the fake as its model, over random operations; and the spec's way to JSON and back."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from statetap.adapters.ledger import SqlLedger
from statetap.adapters.ledger.codec import decode_spec, encode_spec
from statetap.core.placement import Geometry
from statetap.core.records import JobSpec, JobState, SampleStatus, SampleVerdict, ShardObject
from statetap.core.spec import CaptureSpec, Compression, Final, Identity, ModelFacts
from statetap.ports import LedgerError

from tests.contract.ledgers.plan import dataset, job, rows_of, sample, unit
from tests.fakes.ledger import FakeLedger

layers = st.lists(st.integers(0, 200), unique=True, max_size=8).map(lambda ids: tuple(sorted(ids)))
captures = st.builds(CaptureSpec, layers, st.sampled_from([f for f in Final if f is not Final.NONE]))
geometries = st.builds(lambda c, s, a: Geometry(a * c * s, a * c, a), *[st.integers(1, 50)] * 3)
models = st.builds(
    ModelFacts, st.text(), st.text(), *[st.integers(1, 2**31)] * 3, st.sampled_from(["bfloat16", "float16", "float32"])
)
specs = st.builds(
    JobSpec,
    dataset=st.text(),
    store=st.text(),
    capture=captures,
    model=models,
    identity=st.sampled_from(Identity),
    geometry=geometries,
    order=st.sampled_from(["dataset", "permutation"]),
    seed=st.integers(-(2**63), 2**63),
    on_over_long=st.sampled_from(["fail", "truncate", "skip"]),
    first_row=st.integers(0, 2**62),
    first_sample=st.integers(0, 2**40),
    compression=st.sampled_from(Compression),
)


@given(specs)
def test_a_spec_survives_json(spec):
    assert decode_spec(json.loads(json.dumps(encode_spec(spec)))) == spec


def test_a_spec_from_before_there_was_compression_has_none():
    spec = replace(job().spec, compression=Compression.ZSTD)
    data = encode_spec(spec)
    del data["compression"]
    assert decode_spec(data) == replace(spec, compression=Compression.NONE)


def test_a_spec_of_no_layers_or_no_final_state_survives_json():
    for capture in (CaptureSpec((), Final.PRE_NORM), CaptureSpec((0,), Final.NONE)):
        spec = replace(job().spec, capture=capture)
        assert decode_spec(json.loads(json.dumps(encode_spec(spec)))) == spec


@pytest.fixture(scope="module")
def empty_ledger(tmp_path_factory):
    """A ledger file that was migrated and closed: every example starts from a copy of it."""
    path = tmp_path_factory.mktemp("empty") / "ledger.db"

    async def make():
        ledger = SqlLedger(f"sqlite:///{path}")
        await ledger.open()
        await ledger.close()

    asyncio.run(make())
    return path


OWNERS = st.sampled_from(["me", "you"])


async def columns(ledger):
    return rows_of(await ledger.sample_columns("job", 0, 99))


class Comparison(RuleBasedStateMachine):
    """Does the same to both; whatever one answers or refuses, the other must too. Fences of a unit only grow."""

    leases = Bundle("leases")
    template: Path

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        shutil.copy(self.template, f"{self.folder}/ledger.db")
        self.runner = asyncio.Runner()
        self.sql = SqlLedger(f"sqlite:///{self.folder}/ledger.db")
        self.model = FakeLedger()
        self.now = 0.0
        self.fences = {}

    def both(self, call):
        """Call it on both and compare: answers, or kinds of refusal."""

        async def outcome(ledger):
            try:
                return await call(ledger)
            except LedgerError as refusal:
                return type(refusal)

        wanted = self.runner.run(outcome(self.model))
        assert self.runner.run(outcome(self.sql)) == wanted
        return wanted

    @initialize(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4), skipped=st.integers(0, 2))
    def plan(self, sizes, skipped):
        """Units of these many samples; the placement goes backwards through the dataset."""
        total = sum(sizes)
        order = iter(range(total - 1, -1, -1))
        units, samples = [], []
        for index, size in enumerate(sizes):
            members = [next(order) for _ in range(size)]
            units.append(unit(index, members))
            samples += [sample(s, index, 64 * index + 8 * position) for position, s in enumerate(members)]
        samples += [sample(total + n, None, -1, status=SampleStatus.SKIPPED, reason="too long") for n in range(skipped)]
        samples.sort(key=lambda s: s.sample)
        self.both(lambda ledger: ledger.add_dataset(dataset()))
        self.both(lambda ledger: ledger.add_job(job(state=JobState.RUNNING), units, samples))

    @rule(seconds=st.sampled_from([1.0, 5.0, 10.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(target=leases, owner=OWNERS)
    def lease_unit(self, owner):
        self.both(lambda ledger: ledger.peek_unit("job", now=self.now))
        lease = self.both(lambda ledger: ledger.lease_unit("job", owner, now=self.now, ttl_seconds=10.0))
        if lease is not None:
            assert lease.fence > self.fences.get(lease.unit.index, 0)
            self.fences[lease.unit.index] = lease.fence
        return lease

    @rule(owner=OWNERS)
    def renew(self, owner):
        self.both(lambda ledger: ledger.renew_leases(owner, now=self.now, ttl_seconds=10.0))

    @rule(owner=OWNERS)
    def take_over(self, owner):
        self.both(lambda ledger: ledger.take_over(owner))

    @rule(lease=leases, data=st.data())
    def commit(self, lease, data):
        """Also under leases that no longer count, and now and then with a verdict too few or too many."""
        if lease is None:
            return
        judged = [s for s in lease.unit.samples if data.draw(st.integers(0, 15)) > 0]
        if data.draw(st.integers(0, 15)) == 0:
            judged.append(data.draw(st.integers(0, 12)))
        verdicts = [self.verdict(s, stored=data.draw(st.booleans())) for s in judged]
        thing = ShardObject(key=f"aux/c/{lease.unit.index}", nbytes=8)
        self.both(lambda ledger: ledger.commit_unit(lease, verdicts, [thing], bytes_stored=len(judged), at=self.now))

    def verdict(self, index, *, stored):
        if stored:
            return SampleVerdict(
                sample=index,
                status=SampleStatus.STORED,
                reason=None,
                attempts=1,
                worker="w",
                next_token=index,
                digest=2**63 + index,
            )
        return SampleVerdict(sample=index, status=SampleStatus.FAILED, reason=f"reason {index % 2}", attempts=2, worker=None)

    @rule(lease=consumes(leases))
    def give_back(self, lease):
        if lease is not None:
            self.both(lambda ledger: ledger.give_back(lease))

    @rule()
    def cancel(self):
        self.both(lambda ledger: ledger.set_job_state("job", JobState.CANCELLING, "asked to", at=self.now))
        self.both(lambda ledger: ledger.cancel_pending("job", at=self.now))

    @rule(data=st.data())
    def retry(self, data):
        """Some failed samples again, in one new unit; the job runs again, even one that was being cancelled."""
        failed = self.both(lambda ledger: ledger.samples("job", status=SampleStatus.FAILED, limit=99, cursor=None)).items
        chosen = [s for s in failed if data.draw(st.booleans())]
        index = len(self.model.jobs_by_id["job"].units)
        moved = [replace(s, unit=index, row_start=64 * index + 8 * position) for position, s in enumerate(chosen)]
        new = [unit(index, [s.sample for s in moved])] if moved else []
        self.both(lambda ledger: ledger.append_units("job", new, moved, state=JobState.RUNNING, at=self.now))

    @precondition(lambda self: self.model.jobs_by_id)
    @invariant()
    def they_agree(self):
        self.both(lambda ledger: ledger.job("job"))
        self.both(lambda ledger: ledger.samples("job", status=None, limit=99, cursor=None))
        self.both(columns)

    def teardown(self):
        self.both(lambda ledger: ledger.units("job"))
        self.both(lambda ledger: ledger.failures("job"))
        self.runner.run(self.sql.close())
        self.runner.close()
        shutil.rmtree(self.folder)


def test_the_sql_ledger_does_as_its_model(empty_ledger):
    Comparison.template = empty_ledger
    run_state_machine_as_test(
        Comparison, settings=settings(max_examples=12, stateful_step_count=25, deadline=None, print_blob=True)
    )
