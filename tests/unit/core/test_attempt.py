"""core/attempt.py: what one attempt still wants, and when it may be complete."""

import pytest
from statetap.core import unit_messages as msg
from statetap.core.attempt import Attempt, AttemptState
from statetap.core.capture import Complete, Incomplete, Refusal
from statetap.core.spec import Identity

from tests.unit.core.dump_facts import expected, plain_dump, plugin_dump


def attempt(identity, *, chunk=None, dumps=()):
    one = Attempt("rid", 0, "gpu0", expected(10), identity, chunk)
    one.dumps.update({dump.dump_id: dump for dump in dumps})
    return one


@pytest.mark.parametrize("state", AttemptState)
@pytest.mark.parametrize(
    ("identity", "dump", "wanted"),
    [
        (Identity.TOKENS, plugin_dump("a", 0, 10), True),
        (Identity.TOKENS, plugin_dump("a", 4, 6), True),
        (Identity.TOKENS, plugin_dump("a", 10, 11), False),
        (Identity.TOKENS, plugin_dump("a", 9, 11), False),
        (Identity.COUNT, plain_dump("a", 0, 10), True),
        (Identity.COUNT, plain_dump("a", 0, 11), True),
    ],
)
def test_only_an_open_attempt_wants_dumps_and_only_of_the_prompt(state, identity, dump, wanted):
    one = attempt(identity)
    one.state = state
    assert one.wants(dump) is (wanted and state in (AttemptState.ASKED, AttemptState.ANSWERED))


def test_an_answer_is_taken_as_it_is():
    one = attempt(Identity.TOKENS)
    one.answered(msg.RequestAnswered("rid", 10, 3, 42, frozenset({"tap/a"})))
    assert (one.state, one.prompt_tokens, one.cached_tokens, one.next_token) == (AttemptState.ANSWERED, 10, 3, 42)
    assert one.named == {"tap/a"}


def test_the_evidence_is_that_of_its_identity():
    assert attempt(Identity.TOKENS, dumps=[plugin_dump("a", 0, 8), plugin_dump("b", 8, 10)]).verdict() == Complete(("a", "b"))
    plain = [plain_dump("a", 0, 8), plain_dump("b", 1, 2)]
    assert attempt(Identity.COUNT, dumps=plain).verdict() == Incomplete(0, 10)
    assert attempt(Identity.COUNT, chunk=8, dumps=plain).verdict() == Complete(("a", "b"))


def test_what_an_answer_names_is_evidence_by_tokens_alone():
    """Plain dumps have no names, whatever else their server runs."""
    by_tokens = attempt(Identity.TOKENS, dumps=[plugin_dump("a", 0, 10)])
    by_count = attempt(Identity.COUNT, dumps=[plain_dump("a", 0, 10)])
    for one, verdict in ((by_tokens, Refusal), (by_count, Complete)):
        one.answered(msg.RequestAnswered("rid", 10, 0, 42, frozenset({"tap/b"})))
        assert isinstance(one.verdict(), verdict)


def test_by_count_nothing_is_complete_before_its_lifecycle_is_closed():
    by_tokens, by_count = attempt(Identity.TOKENS), attempt(Identity.COUNT)
    assert (by_tokens.may_complete, by_count.may_complete) == (True, False)
    by_count.lifecycle_closed = True
    assert by_count.may_complete


def test_a_lifecycle_is_closed_once():
    one = attempt(Identity.COUNT)
    assert one.ask_to_close() == [msg.CloseLifecycle("rid")]
    assert one.ask_to_close() == []
