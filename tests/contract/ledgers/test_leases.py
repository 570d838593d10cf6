"""Leases: one owner a unit, and a fence that only grows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from statetap.core.records import UnitState
from statetap.ports import LeaseLost, NextUnit

from tests.contract.ledgers.plan import AT_START, UNITS, lease, stored


async def test_units_are_leased_in_order_each_to_one_owner(planned):
    first, second = await lease(planned), await lease(planned, "you", now=1.0)
    assert first.unit == replace(UNITS[0], state=UnitState.LEASED)
    assert (first.owner, first.fence, first.expires_at) == ("me", 1, 60.0)
    assert (second.unit.index, second.owner, second.expires_at) == (1, "you", 61.0)
    assert await planned.lease_unit("job", "me", now=59.0, ttl_seconds=60) is None
    assert await planned.units("job", UnitState.PENDING) == []
    assert await planned.units("job", UnitState.LEASED) == [first.unit, second.unit]


async def test_an_expired_lease_is_leased_again_under_a_higher_fence(planned):
    old = await lease(planned)
    new = await lease(planned, "you", now=60.0)
    assert (new.unit, new.fence) == (old.unit, 2)
    with pytest.raises(LeaseLost, match="fence 1"):
        await planned.commit_unit(old, [stored(3), stored(0)], [], bytes_stored=1, at=61.0)
    await planned.give_back(old)
    assert [u.index for u in await planned.units("job", UnitState.LEASED)] == [0]
    assert (await planned.job("job")).counts == AT_START


async def test_the_owner_of_an_older_lease_has_lost_it_even_to_itself(planned):
    old = await lease(planned)
    new = await lease(planned, now=60.0)
    assert (new.unit.index, new.owner) == (old.unit.index, old.owner)
    with pytest.raises(LeaseLost, match="fence 1"):
        await planned.commit_unit(old, [stored(3), stored(0)], [], bytes_stored=1, at=61.0)
    await planned.give_back(old)
    assert (await planned.commit_unit(new, [stored(3), stored(0)], [], bytes_stored=1, at=61.0)).units_committed == 1


async def test_an_expired_lease_counts_while_nobody_took_the_unit(planned):
    old = await lease(planned)
    assert (await planned.commit_unit(old, [stored(3), stored(0)], [], bytes_stored=1, at=100.0)).stored == 2


async def test_renewing_keeps_an_owners_leases_and_only_those(planned):
    mine = await lease(planned, "me")
    yours = await lease(planned, "you")
    await planned.renew_leases("me", now=50.0, ttl_seconds=60)
    again = await lease(planned, "third", now=70.0)
    assert again.unit.index == yours.unit.index
    assert await planned.lease_unit("job", "third", now=109.0, ttl_seconds=60) is None
    assert (await lease(planned, "third", now=110.0)).unit.index == mine.unit.index


async def test_a_unit_given_back_is_pending_and_its_fence_keeps_growing(planned):
    first = await lease(planned)
    await planned.give_back(first)
    await planned.give_back(first)
    assert await planned.units("job", UnitState.PENDING) == UNITS
    assert (await lease(planned)).fence == 2


async def test_take_over_ends_the_leases_of_all_others(planned):
    dead, own = await lease(planned, "dead"), await lease(planned, "me")
    assert await planned.take_over("me") == [("job", dead.unit.index)]
    assert await planned.take_over("me") == []
    with pytest.raises(LeaseLost):
        await planned.commit_unit(dead, [stored(3), stored(0)], [], bytes_stored=1, at=1.0)
    assert (await lease(planned, "me")).fence == dead.fence + 1
    await planned.commit_unit(own, [stored(1), stored(2)], [], bytes_stored=1, at=1.0)


async def test_peeking_shows_what_would_be_leased_and_leases_nothing(planned):
    first, second = [NextUnit(unit.index, await planned.unit_samples("job", unit.index)) for unit in UNITS]
    assert [sample.sample for sample in first.samples] == list(UNITS[0].samples)
    assert [await planned.peek_unit("job", now=0.0) for _ in range(2)] == [first] * 2
    assert (await lease(planned)).fence == 1
    assert await planned.peek_unit("job", now=0.0) == second
    await lease(planned, now=30.0)
    assert await planned.peek_unit("job", now=59.0) is None
    assert await planned.peek_unit("job", now=60.0) == first
    assert (await lease(planned, now=60.0)).unit.index == first.index
