"""core/routing.py: every dump has one way to go, and only what belongs to nobody is a stray."""

import pytest
from statetap.core.requests import RequestName
from statetap.core.routing import DumpRouter, Parked, Stray, ToUnit

from tests.unit.core.dump_facts import plain_dump, plugin_dump

RID = RequestName("j", 3, 7, 1, 2).rid


def router(*, opened=(), back=()):
    return DumpRouter(set(opened), set(back))


@pytest.mark.parametrize("fence", [1, 2, 3])
def test_a_dump_goes_to_its_unit_by_name_whatever_its_fence(fence):
    rid = RequestName("j", 3, 7, 1, fence).rid
    assert router(opened=[("j", 3)]).route(plugin_dump("a", 0, 4, rid=rid)) == ToUnit(("j", 3), rid)


def test_a_dump_of_a_unit_that_is_to_come_back_is_kept():
    assert router(back=[("j", 3)]).route(plugin_dump("a", 0, 4, rid=RID)) == Parked(("j", 3))


def test_an_open_unit_comes_before_one_that_is_to_come_back():
    assert router(opened=[("j", 3)], back=[("j", 3)]).route(plugin_dump("a", 0, 4, rid=RID)) == ToUnit(("j", 3), RID)


@pytest.mark.parametrize("unit", [("j", 4), ("k", 3)])
def test_a_dump_of_another_unit_is_a_stray(unit):
    assert router(opened=[unit], back=[unit]).route(plugin_dump("a", 0, 4, rid=RID)) == Stray("its unit is not open")


@pytest.mark.parametrize("rid", ["HEALTH_CHECK_1", "st-fence-gpu0-1", ""])
def test_a_dump_of_somebody_else_is_a_stray_even_in_mid_lifecycle(rid):
    routes = router(opened=[("j", 3)], back=[("j", 4)])
    routes.begin_lifecycle(RID)
    assert routes.route(plugin_dump("a", 0, 4, rid=rid)) == Stray("not a request of this service")


def test_a_plain_dump_belongs_to_the_lifecycle_that_it_appears_in():
    routes = router(opened=[("j", 3)])
    assert routes.route(plain_dump("a", 0, 4)) == Stray("no request was in flight")
    routes.begin_lifecycle(RID)
    assert routes.route(plain_dump("b", 1, 4)) == ToUnit(("j", 3), RID)
    routes.end_lifecycle()
    assert routes.route(plain_dump("c", 2, 4)) == Stray("no request was in flight")


def test_units_open_and_close_under_the_router():
    opened, back = {}, {("j", 3)}
    routes = DumpRouter(opened.keys(), back)
    assert routes.route(plugin_dump("a", 0, 4, rid=RID)) == Parked(("j", 3))
    opened["j", 3] = "run"
    back.clear()
    assert routes.route(plugin_dump("a", 0, 4, rid=RID)) == ToUnit(("j", 3), RID)
    del opened["j", 3]
    assert routes.route(plugin_dump("a", 0, 4, rid=RID)) == Stray("its unit is not open")
