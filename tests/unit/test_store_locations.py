"""Where a store may be: below a configured root, wherever links lead."""

from pathlib import Path

import pytest
from statetap.main import locate_store, make_private
from statetap.runtime.views import RefusalKind, Refused
from statetap.settings import Settings


@pytest.fixture
def settings(tmp_path):
    """Two roots; the first holds a link out of it, one into the other, and a loop."""
    first, second, outside = (tmp_path / name for name in ("first", "second", "outside"))
    for folder in (first, second, outside):
        folder.mkdir()
    (first / "out").symlink_to(outside)
    (first / "across").symlink_to(second)
    (first / "loop").symlink_to(first / "loop")
    return Settings(data_dir=tmp_path / "data", store_roots=(first, second))


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("a.zarr", "first/a.zarr"),
        ("deep/er/a.zarr", "first/deep/er/a.zarr"),
        ("a/../b.zarr", "first/b.zarr"),
        ("{tmp}/second/a.zarr", "second/a.zarr"),
        ("across/a.zarr", "second/a.zarr"),
        ("../second/a.zarr", "second/a.zarr"),
        ("~/a.zarr", "first/~/a.zarr"),
    ],
)
def test_a_path_below_a_root_is_a_store(settings, tmp_path, place, found):
    assert locate_store(place.replace("{tmp}", str(tmp_path)), settings) == str(tmp_path / found)


@pytest.mark.parametrize(
    "place",
    [
        "../outside/a.zarr",
        "/etc/a.zarr",
        "{tmp}/outside/a.zarr",
        "out/a.zarr",
        "out",
        "loop/a.zarr",
        "across/../../etc/a.zarr",
        ".",
        "",
        " ",
        "..",
        "across",
        "a\0b",
        "a\nb",
        "a\u202eb",
        "\ud800",
        "file:///a.zarr",
        "s3://bucket/a.zarr",
        "a" * 300,
        "a" * 300 + "/b.zarr",
        "a/" * 3000,
    ],
)
def test_anything_else_is_refused_as_the_requests_fault(settings, tmp_path, place):
    with pytest.raises(Refused) as refused:
        locate_store(place.replace("{tmp}", str(tmp_path)), settings)
    assert (refused.value.kind, refused.value.field) == (RefusalKind.INVALID, "store")


def test_a_store_inside_a_store_is_refused(settings, tmp_path):
    store = tmp_path / "first/a.zarr"
    store.mkdir()
    (store / "zarr.json").write_text("{}")
    assert locate_store("a.zarr", settings) == str(store)
    with pytest.raises(Refused, match="lies inside the store"):
        locate_store("a.zarr/b.zarr", settings)


@pytest.mark.parametrize(
    "place", ["s3://bucket/a/run.zarr", "s3://bucket/a/deep/er/run.zarr", "s3://bucket/a/run.zarr/", "gs://whole/run.zarr"]
)
def test_a_url_below_a_configured_one_is_a_store(settings, place):
    settings = settings.model_copy(update={"object_stores": ("s3://bucket/a", "gs://whole")})
    assert locate_store(place, settings) == place.removesuffix("/")


@pytest.mark.parametrize(
    "place",
    [
        "s3://bucket/a",
        "s3://bucket/a/",
        "s3://bucket/ab/run.zarr",
        "s3://bucket/run.zarr",
        "s3://bucket-2/a/run.zarr",
        "gs://bucket/a/run.zarr",
        "s3://bucket/a/../run.zarr",
        "s3://bucket/a/%2e%2e/run.zarr",
        "s3://bucket/a/./run.zarr",
        "s3://bucket/a//run.zarr",
        "s3://bucket/a/run.zarr//",
        "s3://bucket/a/run.zarr?versionId=1",
        "s3://bucket/a/run.zarr#x",
        "s3://key:secret@bucket/a/run.zarr",
        "s3://bucket:9000/a/run.zarr",
        "s3://BUCKET/a/run.zarr",
        "S3://bucket/a/run.zarr",
        "s3:///bucket/a/run.zarr",
        "s3://bucket/a/run zarr",
        "s3://bucket/a/run.zarr\n",
        "s3://bucket/a/r\u00fcn.zarr",
        "s3://bucket\\a/run.zarr",
        "http://bucket/a/run.zarr",
        "file:///etc/a.zarr",
        "memory://bucket/a/run.zarr",
        "://bucket/a/run.zarr",
    ],
)
def test_any_other_url_is_refused_as_the_requests_fault(settings, place):
    settings = settings.model_copy(update={"object_stores": ("s3://bucket/a",)})
    with pytest.raises(Refused) as refused:
        locate_store(place, settings)
    assert (refused.value.kind, refused.value.field) == (RefusalKind.INVALID, "store")
    assert "secret" not in refused.value.detail


def test_without_configured_ones_every_url_is_refused_with_the_way_out(settings):
    with pytest.raises(Refused, match=r"s3://bucket/a/run.zarr is not below .* \(object_stores\) are none; add its bucket"):
        locate_store("s3://bucket/a/run.zarr", settings)


@pytest.mark.parametrize("before", [None, 0o644])
def test_nobody_else_reads_the_ledger(tmp_path: Path, before):
    ledger = tmp_path / "ledger.db"
    if before is not None:
        ledger.write_bytes(b"kept")
        ledger.chmod(before)
    make_private(ledger)
    assert ledger.stat().st_mode & 0o777 == 0o600
    assert ledger.read_bytes() == (b"kept" if before is not None else b"")
