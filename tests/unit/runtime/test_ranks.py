"""A worker with several data-parallel ranks: when it may be used, what room it has, and what is a restart of it."""

from dataclasses import replace

import pytest
from statetap.adapters.dumps import PluginDumpSource
from statetap.core.records import SampleStatus
from statetap.core.reservation import unit_dump_bytes
from statetap.core.worker import WorkerState
from statetap.telemetry import events
from statetap_sglang.checksum import row_checksums
from statetap_sglang.format import ROW_CHECKSUMS, TOKEN_IDS, TensorView, stem
from statetap_sglang.publisher import DumpPublisher
from statetap_sglang.refusal import Refusal

from tests.fakes.clock import HandClock, settle
from tests.fakes.dumps import make_beacon, make_metadata
from tests.fakes.harness import ARRAYS, MODEL, TAP, FakeWorker, hidden_rows, running
from tests.fakes.inference import Hang

STORED, PENDING = SampleStatus.STORED, SampleStatus.PENDING
UNIT_BYTES = unit_dump_bytes([8], ARRAYS, None)


def view(world):
    return world.pool.list()[0]


def worker_of_ranks(count, **changes):
    worker = FakeWorker("a", announced=False)
    for rank in range(count):
        worker.announce_rank(rank, count, **changes)
    return worker


async def test_a_second_rank_is_no_restart():
    worker = worker_of_ranks(2)
    async with running(worker) as world:
        assert (view(world).state, view(world).model) == (WorkerState.READY, MODEL)
        assert world.logged(events.WORKER_UNREACHABLE) == []
        assert [line["tap"] for line in world.logged(events.WORKER_TAP_SEEN)] == ["boot1-0", "boot1-1"]
        assert [line["tap"] for line in world.logged(events.WORKER_READY)] == ["boot1"]
        job = await world.submit(2, 3)
        assert world.statuses(job) == [STORED, STORED]


async def test_a_worker_waits_for_the_taps_of_all_its_ranks():
    worker = FakeWorker("a", announced=False)
    worker.announce_rank(0, 2)
    async with running(worker) as world:
        assert view(world).state is WorkerState.REFUSED
        assert "no tap has announced itself for 1" in view(world).reason
        assert world.pool.taps() == [], "nothing is planned on half a worker"
        worker.announce_rank(1, 2)
        await settle()
        assert view(world).state is WorkerState.READY


async def test_ranks_that_differ_are_shown_as_refused():
    worker = FakeWorker("a", announced=False)
    worker.announce_rank(0, 2)
    worker.announce_rank(1, 2, model=replace(MODEL, model_fingerprint="other"))
    async with running(worker) as world:
        assert view(world).state is WorkerState.REFUSED
        assert "differ in model_fingerprint" in view(world).reason
        assert world.logged(events.WORKER_REFUSED)[-1]["reason"] == view(world).reason


async def test_another_boot_is_a_restart_and_waits_for_its_ranks_too():
    worker = worker_of_ranks(2)
    async with running(worker) as world:
        worker.restart(announced=False)
        worker.announce_rank(1, 2)
        await settle()
        assert view(world).state is WorkerState.REFUSED
        assert "announced itself for 0" in view(world).reason
        assert [line["reason"] for line in world.logged(events.WORKER_UNREACHABLE)] == ["it was started again"]
        worker.announce_rank(0, 2)
        await settle()
        assert view(world).state is WorkerState.READY


async def test_a_worker_that_was_started_again_in_mid_request_is_identified_before_it_is_asked_again():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        job = await world.submit(2, 3)
        worker.restart(announced=False)
        worker.announce_rank(0, 2)
        await settle()
        assert view(world).state is WorkerState.BUSY
        worker.client.wake()
        await world.passes(5)
        assert len(worker.asked) == 1
        assert view(world).state is WorkerState.REFUSED
        worker.announce_rank(1, 2)
        await world.passes(5)
        assert world.statuses(job) == [STORED, STORED]


async def test_a_rank_whose_process_ends_makes_the_worker_unusable():
    worker = worker_of_ranks(2)
    async with running(worker) as world:
        worker.announce_rank(1, 2, alive=False)
        await settle()
        assert view(world).state is WorkerState.REFUSED
        assert "announced itself for 1" in view(world).reason


async def test_a_worker_whose_only_tap_has_ended_is_told():
    worker = FakeWorker("a")
    async with running(worker) as world:
        worker.source.announce(replace(TAP, alive=False))
        await settle()
        assert [line["reason"] for line in world.logged(events.WORKER_UNREACHABLE)] == ["the process of its tap has ended"]
        assert view(world).state is WorkerState.REFUSED


async def test_a_beacon_that_says_something_else_is_read_anew():
    worker = FakeWorker("a")
    async with running(worker) as world:
        worker.source.announce(replace(TAP, context_length=64))
        await settle()
        assert [line["reason"] for line in world.logged(events.WORKER_UNREACHABLE)] == ["what its taps say has changed"]
        assert (view(world).state, view(world).context_length) == (WorkerState.READY, 64)


async def test_the_same_beacon_again_changes_nothing():
    worker = FakeWorker("a")
    async with running(worker) as world:
        worker.source.announce(replace(TAP, announced_ns=5))
        await settle()
        assert world.logged(events.WORKER_UNREACHABLE) == []


async def test_room_is_that_of_the_smallest_rank_for_all_requests_may_land_there():
    worker = FakeWorker("a", announced=False)
    budget = -(-UNIT_BYTES * 10 // 9)
    worker.announce_rank(0, 2, budget_bytes=10 * budget)
    worker.announce_rank(1, 2, budget_bytes=budget)
    worker.publish = worker.publish_nothing
    async with running(worker) as world:
        assert view(world).budget_bytes == budget
        job = await world.submit(8, 8, 8)
        assert world.statuses(job) == [PENDING] * 3
        assert len(worker.asked) == 1


# --- a tap that refuses


async def test_a_tap_that_refuses_is_shown_with_its_reason_before_any_beacon():
    worker = FakeWorker("a", announced=False)
    worker.refuse("speculative decoding is on: start the server without --speculative-algorithm")
    async with running(worker) as world:
        assert view(world).state is WorkerState.REFUSED
        assert view(world).reason == (
            "tap boot1-0 publishes nothing: speculative decoding is on: start the server without --speculative-algorithm"
        )
        assert [line["reason"] for line in world.logged(events.WORKER_REFUSED)] == [view(world).reason]


async def test_a_tap_that_refuses_after_its_beacon_is_not_used_any_more():
    worker = FakeWorker("a")
    async with running(worker) as world:
        worker.refuse("the model captures other layers")
        await settle()
        assert view(world).state is WorkerState.REFUSED
        assert view(world).reason == "tap boot1-0 publishes nothing: the model captures other layers"
        worker.restart()
        await settle()
        assert view(world).state is WorkerState.READY


# --- real tap directories


class WorkerWithTaps(FakeWorker):
    """A worker with a real dump directory: its ranks publish in turns, and what they did is seen before it answers."""

    def __init__(self, root):
        super().__init__("a", announced=False)
        self.root = root
        self.real = PluginDumpSource(root, self.name, clock=HandClock())
        self.ranks = []

    def boot(self, boot_id, count, *, announced):
        """Begin a boot of so many ranks, of which some announce themselves."""
        for rank in range(count):
            beacon = make_beacon(
                boot_id=boot_id, dp_rank=rank, dp_size=count, hidden_size=4, dtype="float32", final="post_norm", pid=rank + 1
            )
            self.ranks.append(DumpPublisher(self.root, self.name, beacon))
            if rank in announced:
                self.ranks[-1].announce()

    def connect(self):
        return replace(super().connect(), source=self.real)

    async def _on_request(self, samples):
        for sample in samples:
            publisher = self.ranks[len(self.asked) % len(self.ranks)]
            rows, boot_id = len(sample.token_ids), publisher.directory.name.rsplit("-", 1)[0]
            tensors = {
                array.name: TensorView("F32", (rows, *array.row_shape), hidden_rows(array, sample.token_ids).data.cast("B"))
                for array in ARRAYS
            }
            tensors[ROW_CHECKSUMS] = TensorView("I64", (rows,), row_checksums(tensors).data.cast("B"))
            tensors[TOKEN_IDS] = TensorView("I32", (rows,), sample.token_ids.astype("<i4").data.cast("B"))
            number = publisher.reserve()
            publisher.publish(make_metadata(sample.rid, rows, boot_id=boot_id), tensors, number)
            self.names[sample.rid] = {f"{publisher.directory.name}/{stem(number)}"}
        await self.real.rescan()


@pytest.fixture
def with_taps(tmp_path):
    worker = WorkerWithTaps(tmp_path / "dumps")
    yield worker
    for publisher in worker.ranks:
        publisher.close()


async def test_real_taps_of_one_boot_are_one_worker_and_another_boot_is_a_restart(with_taps):
    with_taps.boot("first", 2, announced=[0])
    async with running(with_taps) as world:
        assert "announced itself for 1" in view(world).reason
        with_taps.ranks[1].announce()
        await with_taps.real.rescan()
        await settle()
        assert view(world).state is WorkerState.READY
        job = await world.submit(2, 3, 4, 5)
        assert world.statuses(job) == [STORED] * 4
        world.assert_stored(job)
        assert {publisher.reserve() for publisher in with_taps.ranks} == {2}, "both ranks published"

        for publisher in with_taps.ranks:
            publisher.close()
        with_taps.ranks.clear()
        with_taps.boot("another", 2, announced=[1])
        await with_taps.real.rescan()
        await settle()
        assert "announced itself for 0" in view(world).reason
        with_taps.ranks[0].announce()
        await with_taps.real.rescan()
        again = await world.submit(2, 3, store="again")
        assert world.statuses(again) == [STORED] * 2
        assert [line["tap"] for line in world.logged(events.WORKER_READY)] == ["first", "another"]


async def test_a_real_tap_may_refuse(with_taps):
    with_taps.boot("first", 2, announced=[0])
    Refusal("rank 1 has another model", "0.1.0", "0.5.23").write(with_taps.ranks[1].directory)
    async with running(with_taps) as world:
        assert view(world).state is WorkerState.REFUSED
        assert view(world).reason == "tap first-1 publishes nothing: rank 1 has another model"
