"""The metrics under the names that dashboards use."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from statetap.telemetry.metrics import Metrics


def scraped(metrics):
    """What Prometheus reads: (sample's name, its labels' items) to value."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_every_metric_is_scraped_under_its_name():
    metrics = Metrics()
    metrics.samples_total.labels(outcome="stored").inc(3)
    metrics.tokens_stored_total.inc(100)
    metrics.bytes_stored_total.inc(1 << 40)
    metrics.units_committed_total.inc()
    metrics.requests_total.labels(worker="gpu0", outcome="ok").inc()
    metrics.request_seconds.labels(worker="gpu0").observe(0.02)
    metrics.capture_refusals_total.labels(reason="token ids differ").inc()
    metrics.strays_total.labels(worker="gpu0").inc(2)
    metrics.worker_up.labels(worker="gpu0").set(1)
    metrics.worker_in_flight.labels(worker="gpu0").set(1)
    metrics.dump_bytes.labels(worker="gpu0").set(4096)
    metrics.jobs.labels(state="running").set(2)
    worker = (("worker", "gpu0"),)
    expected = {
        ("statetap_samples_total", (("outcome", "stored"),)): 3,
        ("statetap_tokens_stored_total", ()): 100,
        ("statetap_bytes_stored_total", ()): 1 << 40,
        ("statetap_units_committed_total", ()): 1,
        ("statetap_requests_total", (("outcome", "ok"), *worker)): 1,
        ("statetap_request_seconds_count", worker): 1,
        ("statetap_request_seconds_bucket", (("le", "0.01"), *worker)): 0,
        ("statetap_request_seconds_bucket", (("le", "0.03"), *worker)): 1,
        ("statetap_capture_refusals_total", (("reason", "token ids differ"),)): 1,
        ("statetap_strays_total", worker): 2,
        ("statetap_worker_up", worker): 1,
        ("statetap_worker_in_flight", worker): 1,
        ("statetap_dump_bytes", worker): 4096,
        ("statetap_jobs", (("state", "running"),)): 2,
    }
    assert expected.items() <= scraped(metrics).items()


def test_two_services_in_one_process_count_apart():
    one, other = Metrics(), Metrics()
    one.units_committed_total.inc()
    assert scraped(other)["statetap_units_committed_total", ()] == 0


@pytest.mark.parametrize("measured", [True, False])
def test_a_worker_that_left_has_no_gauges(measured):
    metrics = Metrics()
    metrics.strays_total.labels(worker="gpu0").inc()
    if measured:
        metrics.worker_up.labels(worker="gpu0").set(1)
    metrics.forget_worker("gpu0")
    names = {name for name, labels in scraped(metrics) if ("worker", "gpu0") in labels}
    assert names == {"statetap_strays_total", "statetap_strays_created"}
