from __future__ import annotations

from statetap_sglang.names import DumpNames


def test_names_of_all_passes_in_their_order() -> None:
    names = DumpNames()
    for name in ("t/req_0", "t/req_2"):
        names.add("a", name)
    names.add("b", "t/req_1")
    assert names.of("a") == ["t/req_0", "t/req_2"]
    assert names.of("b") == ["t/req_1"]
    assert names.of("c") is None


def test_the_list_given_is_not_the_one_kept() -> None:
    names = DumpNames()
    names.add("a", "t/req_0")
    given = names.of("a")
    names.add("a", "t/req_1")
    assert given == ["t/req_0"]


def test_the_requests_not_heard_of_for_longest_are_forgotten() -> None:
    names = DumpNames(max_requests=2, max_names=2)
    for rid in ("a", "b", "a", "c"):
        names.add(rid, f"t/{rid}")
    assert names.of("b") is None
    assert names.of("a") == ["t/a", "t/a"]
    names.add("a", "t/more")
    assert names.of("a") == ["t/a", "t/a"]
