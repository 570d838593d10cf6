from __future__ import annotations

from collections.abc import Callable

from statetap.embedded.model import TappedModel
from statetap.embedded.prefix_cache import PrefixCache
from transformers import DynamicCache

Tokens = Callable[[int], tuple[int, ...]]


def filled(model: TappedModel, ids: tuple[int, ...]) -> DynamicCache:
    cache = DynamicCache()
    model.run(ids, cache)
    return cache


def test_an_empty_cache_gives_nothing() -> None:
    length, cache = PrefixCache(100).longest(None, (1, 2, 3))
    assert (length, cache.get_seq_length()) == (0, 0)


def test_the_longest_common_prefix_is_given_short_of_the_last_token(llama: TappedModel, tokens: Tokens) -> None:
    cache, prompt = PrefixCache(1000), tokens(50)
    cache.keep(None, prompt, filled(llama, prompt))
    for wanted, expected in ((prompt, 49), (prompt[:20], 19), (prompt + tokens(5), 50), (prompt[:30] + tokens(9), 30)):
        length, given = cache.longest(None, wanted)
        assert (length, given.get_seq_length()) == (expected, expected)


def test_a_given_prefix_goes_on_as_the_whole_would(llama: TappedModel, tokens: Tokens) -> None:
    cache, shared = PrefixCache(1000), tokens(40)
    cache.keep(None, shared + tokens(10), filled(llama, shared + tokens(10)))
    prompt = shared + tokens(15)
    length, given = cache.longest(None, prompt)
    rest = llama.run(prompt[length:], given).states["last_hidden_states"]
    whole = llama.run(prompt, DynamicCache()).states["last_hidden_states"]
    assert float((rest - whole[length:]).abs().max() / whole.abs().max()) < 1e-5


def test_what_was_kept_does_not_change_when_its_taker_goes_on(llama: TappedModel, tokens: Tokens) -> None:
    cache, prompt = PrefixCache(1000), tokens(30)
    cache.keep(None, prompt, filled(llama, prompt))
    _, first = cache.longest(None, prompt)
    llama.run(tokens(20), first)
    length, second = cache.longest(None, prompt)
    assert (length, second.get_seq_length()) == (29, 29)


def test_extra_keys_are_worlds_apart(llama: TappedModel, tokens: Tokens) -> None:
    cache, prompt = PrefixCache(1000), tokens(30)
    cache.keep("a", prompt, filled(llama, prompt))
    assert cache.longest("b", prompt)[0] == cache.longest(None, prompt)[0] == 0
    assert cache.longest("a", prompt)[0] == 29


def test_the_least_recently_used_goes_first(llama: TappedModel, tokens: Tokens) -> None:
    cache, prompts = PrefixCache(100), [tokens(40) for _ in range(3)]
    for prompt in prompts[:2]:
        cache.keep(None, prompt, filled(llama, prompt))
    cache.longest(None, prompts[0])
    cache.keep(None, prompts[2], filled(llama, prompts[2]))
    assert cache.tokens == 80
    assert [cache.longest(None, p)[0] for p in prompts] == [39, 0, 39]


def test_a_sequence_replaces_its_own_beginning(llama: TappedModel, tokens: Tokens) -> None:
    cache, prompt = PrefixCache(1000), tokens(60)
    cache.keep(None, prompt[:30], filled(llama, prompt[:30]))
    cache.keep(None, prompt, filled(llama, prompt))
    assert cache.tokens == 60
    cache.clear()
    assert cache.tokens == 0
