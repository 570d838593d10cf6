"""core/requests.py: a request's name says whose it is, and comes back from a dump as it went out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statetap.core.requests import RequestName

numbers = st.integers(0, 2**63)
names = st.builds(RequestName, st.from_regex(r"[a-z0-9]+", fullmatch=True), numbers, numbers, numbers, numbers)


@settings(deadline=None)
@given(names)
def test_a_name_survives_its_rid(name):
    assert RequestName.parse(name.rid) == name


@settings(deadline=None)
@given(names, names)
def test_two_names_have_two_rids(one, other):
    assert (one.rid == other.rid) == (one == other)


@pytest.mark.parametrize(
    "rid",
    [
        "",
        "st",
        "st-job-1-2-3",
        "st-job-1-2-3-4-5",
        "st-job-1-2-x-4",
        "st-job-1-2--3-4",
        "st--1-2-3-4",
        "st-JOB-1-2-3-4",
        "xst-job-1-2-3-4",
        "st-job-1-2-3-4 ",
        "st-fence-gpu0-1",
        "8a3f1c0e-54d2-4f0f-9a31-0b3cbb0b2f10",
        "HEALTH_CHECK_1718",
    ],
)
def test_what_is_not_ours_has_no_name(rid):
    assert RequestName.parse(rid) is None
