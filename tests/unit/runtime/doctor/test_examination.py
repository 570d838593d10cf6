"""One worker, one fault: the finding that must come of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from statetap.adapters.store.threaded_capture_inspector import ThreadedCaptureInspector
from statetap.core.dumps import DumpFacts
from statetap.core.requests import RequestName
from statetap.core.spec import Identity
from statetap.ports import DumpSourceError
from statetap.runtime.doctor.examination import examine
from statetap.runtime.doctor.findings import Diagnosis, Severity
from statetap.runtime.doctor.inputs import ServiceView, capture_of
from statetap.runtime.doctor.probing import RID_PREFIX

from tests.fakes.examined import BEACON, FakeExamined, Faults, QuickClock

TIMEOUT = 5.0


@pytest.fixture
def inspector():
    inspector = ThreadedCaptureInspector(parallel=1)
    yield inspector
    inspector.close()


@pytest.fixture
def diagnose(inspector):
    async def run(*workers, **options) -> Diagnosis:
        return await examine(workers, clock=QuickClock(), inspector=inspector, run="test", timeout_seconds=TIMEOUT, **options)

    return run


def bad(diagnosis: Diagnosis) -> set[tuple[str, str]]:
    """The checks with a warning or an error."""
    found = [*(finding for report in diagnosis.reports for finding in report.findings), *diagnosis.across]
    return {(one.check, str(one.severity)) for one in found if one.severity in (Severity.WARNING, Severity.ERROR)}


def said(diagnosis: Diagnosis, check: str) -> str:
    found = [*(finding for report in diagnosis.reports for finding in report.findings), *diagnosis.across]
    return "\n".join(f"{one.severity}: {one.seen}; {one.fix}" for one in found if one.check == check)


@pytest.mark.parametrize("identity", [Identity.TOKENS, Identity.COUNT])
async def test_a_sound_worker_has_nothing_against_it(diagnose, identity):
    server = FakeExamined(identity=identity)
    diagnosis = await diagnose(server.examined())
    assert bad(diagnosis) == set()
    for check in ("round_trip", "values", "same_prompt_twice", "decode_rows", "chunked"):
        assert said(diagnosis, check).startswith("ok: "), check
    assert server.source.held == []


async def test_a_split_prompt_is_compared_with_a_whole_one(diagnose):
    diagnosis = await diagnose(FakeExamined().examined())
    assert "in 2 chunks against one pass: relative difference layer 1 0, layer 7 0, post_norm 0" in said(diagnosis, "chunked")
    assert "pre_norm is the output of layer 7" in said(diagnosis, "layers")


async def test_every_prompt_stays_inside_the_vocabulary_under_names_of_its_own(diagnose):
    server = FakeExamined()
    await diagnose(server.examined())
    samples = [sample for request in server.requests for sample in request]
    assert len(samples) > 4
    assert min(sample.token_ids.min() for sample in samples) >= 0
    assert max(sample.token_ids.max() for sample in samples) < server.beacon.vocab_size
    for names in ([sample.rid for sample in samples], [sample.extra_key for sample in samples]):
        assert len(set(names)) == len(names)
        assert not any(RequestName.parse(name) for name in names), "a service would take the dump for one of its own"


TOKENS_FAULTS = [
    (Faults(dead=True), ("reachable", "error"), "connection refused"),
    (Faults(starting=True), ("reachable", "error"), "takes no requests yet"),
    (Faults(hangs=True), ("round_trip", "error"), "no answer within 5 s"),
    (Faults(publishes=False), ("round_trip", "error"), "nothing appeared in the dump directory"),
    (Faults(publishes=False, names_dumps=("boot9-0/req_4",)), ("round_trip", "error"), "published boot9-0/req_4"),
    (Faults(names_dumps=("boot9-0/req_4",)), ("round_trip", "error"), "unnamed_dump"),
    (Faults(loses="the tmpfs is full"), ("round_trip", "error"), "the tmpfs is full"),
    (Faults(ignores_extra_key=True), ("same_prompt_twice", "error"), "prefix_cached: 63 of 64"),
    (Faults(decode_rows=True), ("decode_rows", "warning"), "4 dumps of decode passes"),
    (Faults(wrong_tokens=True), ("round_trip", "error"), "wrong_tokens"),
    (Faults(not_finite=True), ("values", "error"), "is not finite"),
    (Faults(torn=True), ("row_checksums", "error"), "wrong_checksum"),
    (Faults(drifts=0.01), ("same_prompt_twice", "error"), "more than rounding"),
    (Faults(chunk_error=0.01), ("chunked", "warning"), "up to 0.0001 is rounding"),
    (Faults(chunk_error=1), ("chunked", "error"), "in 2 chunks"),
    (Faults(norm_of_norm=True), ("layers", "error"), "must be the output of the last layer"),
]


@pytest.mark.parametrize(("faults", "finding", "words"), TOKENS_FAULTS, ids=[repr(words) for *_, words in TOKENS_FAULTS])
async def test_a_fault_is_found_and_said(diagnose, faults, finding, words):
    server = FakeExamined(faults=faults)
    diagnosis = await diagnose(server.examined())
    assert bad(diagnosis) == {finding}
    assert words in said(diagnosis, finding[0])
    assert server.source.held == []


COUNT_FAULTS = [
    (Faults(publishes=False), ("round_trip", "error"), "nothing appeared"),
    (Faults(ignores_extra_key=True), ("same_prompt_twice", "error"), "prefix_cached"),
    (Faults(decode_rows=True), ("decode_rows", "warning"), "4 dumps"),
    (Faults(foreign_traffic=True), ("round_trip", "error"), "ambiguous"),
]


@pytest.mark.parametrize(("faults", "finding", "words"), COUNT_FAULTS, ids=[repr(words) for *_, words in COUNT_FAULTS])
async def test_a_fault_is_found_by_count_too(diagnose, faults, finding, words):
    server = FakeExamined(identity=Identity.COUNT, faults=faults)
    diagnosis = await diagnose(server.examined())
    assert bad(diagnosis) == {finding}
    assert words in said(diagnosis, finding[0])
    assert server.source.held == []


async def test_by_count_a_prompt_is_split_as_declared(diagnose):
    diagnosis = await diagnose(FakeExamined(identity=Identity.COUNT).examined())
    assert "a prompt of 96 tokens came in 2 dumps, as declared" in said(diagnosis, "chunked")


async def test_a_request_that_hangs_is_aborted_and_ends_the_prompts(diagnose):
    server = FakeExamined(faults=Faults(hangs=True))
    await diagnose(server.examined())
    assert server.aborted == [sample.rid for request in server.requests for sample in request]
    assert len(server.requests) == 1


async def test_a_worker_that_a_service_works_with_is_sent_nothing(diagnose):
    server = FakeExamined()
    worker = replace(server.examined(watched=True), service=ServiceView("ready", None, 1))
    diagnosis = await diagnose(worker)
    assert server.requests == []
    assert bad(diagnosis) == {("in_use", "warning")}
    assert "a running service has it as ready, with a request in flight" in said(diagnosis, "in_use")
    assert "statetap workers remove a" in said(diagnosis, "in_use")


async def test_requests_of_others_are_told(diagnose):
    assert bad(await diagnose(FakeExamined(running=3).examined())) == {("in_use", "warning")}


async def test_a_passive_examination_sends_nothing(diagnose):
    server = FakeExamined()
    diagnosis = await diagnose(server.examined(), send_prompts=False)
    assert server.requests == []
    assert bad(diagnosis) == set()


async def test_dumps_of_others_stay_and_those_of_an_examination_that_was_killed_go(diagnose):
    server = FakeExamined()
    for number, rid in enumerate(("st-job-0-0-1-1", "somebody", f"{RID_PREFIX}killed-a-0")):
        row = np.ones((1, 16), "<f4").tobytes()
        facts = DumpFacts(
            dump_id=f"old/{number}",
            sequence=number,
            rows=1,
            nbytes=4096,
            tensors=(("last_hidden_states", "float32", (1, 16)),),
            capture=capture_of(BEACON),
            model_fingerprint="fingerprint",
            rid=rid,
            token_ids=bytes(4),
        )
        server.source.put(facts, {"last_hidden_states": row})
    assert bad(await diagnose(server.examined())) == set()
    assert server.source.held == ["old/0", "old/1"]


async def test_a_directory_that_cannot_be_watched_is_a_finding(diagnose):
    server = FakeExamined()
    server.source.broken = DumpSourceError("/dumps/a is watched for another service")
    diagnosis = await diagnose(server.examined())
    assert bad(diagnosis) == {("dump_directory", "error")}
    assert server.requests == []


async def test_a_prompt_has_no_room_where_the_chunk_is_tiny(diagnose):
    server = FakeExamined(beacon=replace(BEACON, chunked_prefill_size=2))
    assert bad(await diagnose(server.examined())) == {("round_trip", "error")}
    assert server.requests == []


async def test_a_worker_with_other_weights_is_found_though_it_says_the_same(diagnose):
    servers = [FakeExamined(), FakeExamined(faults=Faults(weights=1.5)), FakeExamined()]
    diagnosis = await diagnose(*(server.examined(name) for name, server in zip("abc", servers, strict=True)))
    assert bad(diagnosis) == {("agreement", "error")}
    errors = [finding.seen for finding in diagnosis.across if finding.severity is Severity.ERROR]
    assert len(errors) == 1
    assert errors[0].startswith("b and ")


async def test_layers_that_are_off_by_one_are_named(diagnose):
    beacon = replace(BEACON, aux_layer_ids=(1, 2))
    right, shifted = FakeExamined(beacon=beacon), FakeExamined(beacon=beacon, faults=Faults(shift=1))
    diagnosis = await diagnose(right.examined("right"), shifted.examined("shifted"))
    assert bad(diagnosis) == {("agreement", "error")}
    assert "shifted's layer 1 is right's layer 2" in said(diagnosis, "agreement")


async def test_workers_of_one_kind_agree_and_a_dead_one_does_not_matter(diagnose):
    servers = [FakeExamined(), FakeExamined(), FakeExamined(faults=Faults(dead=True))]
    diagnosis = await diagnose(*(server.examined(name) for name, server in zip("abc", servers, strict=True)))
    assert bad(diagnosis) == {("reachable", "error")}
    assert "b and a, the same prompt: relative error layer 1 0" in said(diagnosis, "agreement")
    assert "not compared, for lack of states" in said(diagnosis, "agreement")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"aux_layer_ids": (1, 2)}, "layers"),
        ({"final": "post_norm"}, "final state"),
        ({"model_fingerprint": "other"}, "model fingerprint"),
    ],
)
async def test_workers_that_capture_other_things_are_told_apart(diagnose, change, words):
    other = FakeExamined(beacon=replace(BEACON, **change))
    diagnosis = await diagnose(FakeExamined().examined("a"), other.examined("b"), send_prompts=False)
    assert bad(diagnosis) == {("agreement", "error")}
    assert f"error: {words}: b says" in said(diagnosis, "agreement")


async def test_one_server_under_two_names_is_found_and_asked_once(diagnose):
    server = FakeExamined()
    diagnosis = await diagnose(server.examined("a"), server.examined("b"))
    assert bad(diagnosis) == {("configuration", "error")}
    assert "a and b are one server" in said(diagnosis, "configuration")
    asked = {sample.rid.split("-")[3] for request in server.requests for sample in request}
    assert len(asked) == 1
