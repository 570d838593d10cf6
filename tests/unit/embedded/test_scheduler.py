from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from statetap.embedded.model import TappedModel
from statetap.embedded.outlets import PublishedRows
from statetap.embedded.prefix_cache import PrefixCache
from statetap.embedded.requests import BadRequest, SampleRequest
from statetap.embedded.scheduler import SampleAnswer, Scheduler
from transformers import DynamicCache

Tokens = Callable[[int], tuple[int, ...]]
ANSWER_SECONDS = 60


class Recorder:
    """An outlet that keeps what it is given. At its `hold_at`-th rows it keeps the scheduler in their pass until `go_on`.

    It names its dumps `tap/req_0`, `tap/req_1`, … if `names`.
    """

    def __init__(self, *, hold_at: int = 0, names: bool = False) -> None:
        self.rows: list[PublishedRows] = []
        self.hold_at = hold_at
        self.names = names
        self.reached, self.go_on = threading.Event(), threading.Event()

    def publish(self, rows: PublishedRows) -> str | None:
        self.rows.append(rows)
        if len(self.rows) == self.hold_at:
            self.reached.set()
            assert self.go_on.wait(ANSWER_SECONDS)
        return f"tap/req_{len(self.rows) - 1}" if self.names else None

    def close(self) -> None:
        pass

    @property
    def ranges(self) -> list[tuple[str, int, int]]:
        return [(r.rid, r.prefix_len, len(r.token_ids)) for r in self.rows]

    @property
    def passes(self) -> list[int]:
        return [r.forward_pass for r in self.rows]


def sample(
    rid: str, token_ids: tuple[int, ...], new: int = 1, *, key: str | None = None, ignore_eos: bool = True
) -> SampleRequest:
    return SampleRequest(rid=rid, token_ids=token_ids, max_new_tokens=new, extra_key=key, ignore_eos=ignore_eos)


@contextmanager
def running(scheduler: Scheduler) -> Iterator[Scheduler]:
    scheduler.start()
    yield scheduler
    assert scheduler.stop(ANSWER_SECONDS)


def unexpected(error: Exception) -> None:
    raise AssertionError("the scheduler died") from error


def make(model: TappedModel, outlet: Recorder, *, chunk: int | None = 64, **options: Any) -> Scheduler:
    settings: dict[str, Any] = {"on_fatal": unexpected} | options
    return Scheduler(model, outlet, chunk_size=chunk, **settings)


def run_all(scheduler: Scheduler, requests: Sequence[SampleRequest]) -> list[SampleAnswer]:
    """All of one request, so that they are waiting together when the first pass is made up."""
    return [future.result(ANSWER_SECONDS) for future in scheduler.submit(requests)]


@pytest.mark.parametrize(
    ("length", "chunk", "expected"),
    [
        (150, 64, [(0, 64), (64, 64), (128, 22)]),
        (128, 64, [(0, 64), (64, 64)]),
        (129, 64, [(0, 64), (64, 64), (128, 1)]),
        (127, 64, [(0, 64), (64, 63)]),
        (150, None, [(0, 150)]),
        (1, 64, [(0, 1)]),
    ],
)
def test_a_prompt_is_cut_into_chunks(
    llama: TappedModel, tokens: Tokens, length: int, chunk: int | None, expected: list[tuple[int, int]]
) -> None:
    outlet, prompt = Recorder(), tokens(length)
    with running(make(llama, outlet, chunk=chunk)) as scheduler:
        run_all(scheduler, [sample("a", prompt)])
    assert [(start, rows) for _, start, rows in outlet.ranges] == expected
    assert outlet.passes == list(range(1, len(expected) + 1))
    assert sum((r.token_ids for r in outlet.rows), ()) == prompt
    assert all(r.prompt_len == length and 0 < r.forward_start_ns <= r.forward_end_ns for r in outlet.rows)
    assert all(len(t) == len(r.token_ids) for r in outlet.rows for t in r.states.values())


def test_a_batch_fills_passes_and_splits_a_short_prompt(llama: TappedModel, tokens: Tokens) -> None:
    outlet = Recorder()
    with running(make(llama, outlet)) as scheduler:
        run_all(scheduler, [sample("a", tokens(30)), sample("b", tokens(25)), sample("c", tokens(40))])
    assert outlet.ranges == [("a", 0, 30), ("b", 0, 25), ("c", 0, 9), ("c", 9, 31)]
    assert outlet.passes == [1, 1, 1, 2]


def test_an_answer_names_the_dumps_of_its_own_request_token_by_token(llama: TappedModel, tokens: Tokens) -> None:
    outlet = Recorder(names=True)
    with running(make(llama, outlet, publish_decode=True)) as scheduler:
        first, second = run_all(scheduler, [sample("a", tokens(30), new=2), sample("b", tokens(40))])
    assert outlet.ranges == [("a", 0, 30), ("b", 0, 34), ("b", 34, 6), ("a", 30, 1)]
    assert first.dumps == [["tap/req_0"], ["tap/req_0", "tap/req_3"]]
    assert second.dumps == [["tap/req_1", "tap/req_2"]]


def test_where_dumps_have_no_names_an_answer_says_nothing_of_them(llama: TappedModel, tokens: Tokens) -> None:
    with running(make(llama, Recorder())) as scheduler:
        [answer] = run_all(scheduler, [sample("a", tokens(30))])
    assert answer.dumps is None


def test_what_shares_a_pass_does_not_change_a_bit(llama: TappedModel, tokens: Tokens) -> None:
    outlet, prompts = Recorder(), [tokens(30), tokens(12), tokens(30)]
    with running(make(llama, outlet, chunk=None)) as scheduler:
        run_all(scheduler, [sample(str(i), prompt) for i, prompt in enumerate(prompts)])
    assert outlet.passes == [1, 1, 1]
    for rows, prompt in zip(outlet.rows, prompts, strict=True):
        alone = llama.run(prompt, DynamicCache()).states
        assert all(torch.equal(rows.states[name], alone[name]) for name in alone)


def test_n_tokens_take_an_extend_and_n_minus_1_decodes(llama: TappedModel, tokens: Tokens) -> None:
    outlet, prompt = Recorder(), tokens(20)
    with running(make(llama, outlet, publish_decode=True)) as scheduler:
        [answer] = run_all(scheduler, [sample("a", prompt, 5)])
    assert outlet.ranges == [("a", 0, 20), ("a", 20, 1), ("a", 21, 1), ("a", 22, 1), ("a", 23, 1)]
    assert outlet.passes == [1, 2, 3, 4, 5]
    assert [r.token_ids[0] for r in outlet.rows[1:]] == answer.output_ids[:-1]
    assert answer.finish_reason == {"type": "length", "length": 5}


def test_the_answer_is_greedy_decoding(llama: TappedModel, tokens: Tokens) -> None:
    prompt, expected = tokens(20), []
    for _ in range(5):
        expected.append(llama.run(prompt + tuple(expected), DynamicCache()).next_token)
    with running(make(llama, Recorder(), chunk=8)) as scheduler:
        [answer] = run_all(scheduler, [sample("a", prompt, 5)])
    assert answer.output_ids == expected
    assert (answer.rid, answer.prompt_tokens, answer.cached_tokens) == ("a", 20, 0)


def test_decode_passes_move_the_counter_even_unpublished(llama: TappedModel, tokens: Tokens) -> None:
    outlet = Recorder()
    with running(make(llama, outlet)) as scheduler:
        run_all(scheduler, [sample("a", tokens(20), 8)])
        run_all(scheduler, [sample("b", tokens(20), 0)])
    assert outlet.ranges == [("a", 0, 20), ("b", 0, 20)]
    assert outlet.passes == [1, 9]


def test_no_token_asked_none_answered(llama: TappedModel, tokens: Tokens) -> None:
    outlet = Recorder()
    with running(make(llama, outlet, publish_decode=True)) as scheduler:
        [answer] = run_all(scheduler, [sample("a", tokens(20), 0)])
    assert answer.output_ids == []
    assert outlet.ranges == [("a", 0, 20)]


def test_an_end_token_ends_the_answer_unless_ignored(llama: TappedModel, tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens(20)
    monkeypatch.setattr(llama, "eos_token_ids", frozenset({llama.run(prompt, DynamicCache()).next_token}))
    with running(make(llama, Recorder())) as scheduler:
        stopped, ignored = run_all(scheduler, [sample("a", prompt, 6, ignore_eos=False), sample("b", prompt, 6)])
    assert stopped.finish_reason == {"type": "stop", "matched": stopped.output_ids[0]}
    assert (len(stopped.output_ids), len(ignored.output_ids)) == (1, 6)


def test_waiting_prompts_go_before_running_decodes(llama: TappedModel, tokens: Tokens) -> None:
    outlet = Recorder(hold_at=1)
    with running(make(llama, outlet, publish_decode=True)) as scheduler:
        first = scheduler.submit([sample("a", tokens(10), 3)])
        assert outlet.reached.wait(ANSWER_SECONDS)
        second = scheduler.submit([sample("b", tokens(10), 2)])
        outlet.go_on.set()
        assert [len(f.result(ANSWER_SECONDS).output_ids) for f in first + second] == [3, 2]
    assert outlet.ranges == [("a", 0, 10), ("b", 0, 10), ("a", 10, 1), ("b", 10, 1), ("a", 11, 1)]
    assert outlet.passes == [1, 2, 3, 3, 4]


def test_the_prefix_cache_shortens_what_is_published(llama: TappedModel, tokens: Tokens) -> None:
    outlet, prompt = Recorder(), tokens(150)
    shared = prompt[:100] + tokens(30)
    with running(make(llama, outlet, chunk=None, prefix_cache=PrefixCache(10_000))) as scheduler:
        answers = [
            run_all(scheduler, [request])[0]
            for request in (
                sample("first", prompt),
                sample("again", prompt),
                sample("shared", shared),
                sample("apart", prompt, key="k"),
            )
        ]
        scheduler.flush_cache()
        run_all(scheduler, [sample("flushed", prompt)])
    assert outlet.ranges == [("first", 0, 150), ("again", 149, 1), ("shared", 100, 30), ("apart", 0, 150), ("flushed", 0, 150)]
    assert [a.cached_tokens for a in answers] == [0, 149, 100, 0]
    assert len({tuple(a.output_ids) for a in (answers[0], answers[1], answers[3])}) == 1


def test_answered_tokens_are_cached_too(llama: TappedModel, tokens: Tokens) -> None:
    prompt = tokens(20)
    with running(make(llama, Recorder(), prefix_cache=PrefixCache(10_000))) as scheduler:
        [first] = run_all(scheduler, [sample("a", prompt, 4)])
        [second] = run_all(scheduler, [sample("b", (*prompt, *first.output_ids, 5), 1)])
    assert second.cached_tokens == 20 + 3


def test_a_waiting_sample_is_aborted_before_it_runs(llama: TappedModel, tokens: Tokens) -> None:
    outlet = Recorder(hold_at=1)
    with running(make(llama, outlet)) as scheduler:
        first = scheduler.submit([sample("a", tokens(64))])
        assert outlet.reached.wait(ANSWER_SECONDS)
        second = scheduler.submit([sample("b", tokens(10))])
        assert scheduler.load() == (0, 2)
        scheduler.abort("b")
        outlet.go_on.set()
        assert second[0].result(ANSWER_SECONDS).finish_reason["type"] == "abort"
        assert first[0].result(ANSWER_SECONDS).finish_reason["type"] == "length"
    assert outlet.ranges == [("a", 0, 64)]


def test_a_sample_is_aborted_between_its_chunks(llama: TappedModel, tokens: Tokens) -> None:
    outlet = Recorder(hold_at=1)
    with running(make(llama, outlet)) as scheduler:
        [future] = scheduler.submit([sample("a", tokens(200))])
        assert outlet.reached.wait(ANSWER_SECONDS)
        scheduler.abort("a")
        outlet.go_on.set()
        answer = future.result(ANSWER_SECONDS)
        assert scheduler.load() == (0, 0)
    assert answer.finish_reason["type"] == "abort"
    assert (answer.output_ids, outlet.ranges) == ([], [("a", 0, 64)])


def test_a_running_sample_is_aborted_between_its_decodes(llama: TappedModel, tokens: Tokens) -> None:
    outlet = Recorder(hold_at=3)
    with running(make(llama, outlet, publish_decode=True)) as scheduler:
        [future] = scheduler.submit([sample("a", tokens(20), 9)])
        assert outlet.reached.wait(ANSWER_SECONDS)
        assert scheduler.load() == (1, 0)
        scheduler.abort("a")
        outlet.go_on.set()
        answer = future.result(ANSWER_SECONDS)
    assert answer.finish_reason["type"] == "abort"
    assert len(answer.output_ids) == 3


def test_aborting_the_unknown_is_no_error(llama: TappedModel, tokens: Tokens) -> None:
    with running(make(llama, Recorder())) as scheduler:
        scheduler.abort("nobody")
        assert run_all(scheduler, [sample("a", tokens(5))])[0].finish_reason["type"] == "length"


def test_a_rid_is_in_flight_once_and_free_again_afterwards(llama: TappedModel, tokens: Tokens) -> None:
    outlet = Recorder(hold_at=1)
    with running(make(llama, outlet)) as scheduler:
        first = scheduler.submit([sample("a", tokens(5))])
        assert outlet.reached.wait(ANSWER_SECONDS)
        with pytest.raises(BadRequest, match="Duplicate request ID detected: a"):
            scheduler.submit([sample("b", tokens(5)), sample("a", tokens(5))])
        outlet.go_on.set()
        first[0].result(ANSWER_SECONDS)
        run_all(scheduler, [sample("a", tokens(5)), sample("b", tokens(5))])


def test_a_token_outside_the_vocabulary_is_the_end(llama: TappedModel) -> None:
    died: list[Exception] = []
    with running(make(llama, Recorder(), on_fatal=died.append)) as scheduler:
        [answer] = run_all(scheduler, [sample("a", (5, 1024))])
    assert [type(error) for error in died] == [IndexError]
    assert answer.finish_reason["type"] == "abort"


def test_stopping_answers_what_is_in_flight(llama: TappedModel, tokens: Tokens) -> None:
    outlet = Recorder(hold_at=1)
    scheduler = make(llama, outlet)
    scheduler.start()
    futures = scheduler.submit([sample("a", tokens(200)), sample("b", tokens(5))])
    assert outlet.reached.wait(ANSWER_SECONDS)
    assert not scheduler.stop(0)
    outlet.go_on.set()
    assert [f.result(ANSWER_SECONDS).finish_reason["type"] for f in futures] == ["abort", "abort"]
    assert scheduler.stop(ANSWER_SECONDS)
    with pytest.raises(BadRequest, match="shutting down"):
        scheduler.submit([sample("c", tokens(5))])
