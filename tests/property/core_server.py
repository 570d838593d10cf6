"""A worker as it is behind its URL: what it runs, computes, publishes, loses and delays. Rows have contents, but no bytes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from itertools import pairwise

from statetap.core.capture import TOKEN_BYTES
from statetap.core.dumps import DumpFacts
from statetap.core.spec import CaptureSpec, Final, HiddenArray

CAPTURE = CaptureSpec((), Final.POST_NORM)
FINGERPRINT = "weights"
ARRAYS = (HiddenArray("last_hidden_states", (4,), "bfloat16"),)
Prompt = tuple[int, ...]


def token_bytes(prompt: Prompt) -> bytes:
    return array("i", prompt).tobytes()


@dataclass(frozen=True, slots=True)
class Row:
    """What stands in one row. `bits` are those of one computation: done twice, it need not give the same."""

    prompt: Prompt
    index: int
    bits: str


@dataclass(frozen=True, slots=True)
class Published:
    facts: DumpFacts
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """An error record: the publisher could not publish a dump of `rid`."""

    rid: str


@dataclass(frozen=True, slots=True)
class Answer:
    prompt_tokens: int
    cached_tokens: int
    next_token: int
    named: frozenset[str] | None


@dataclass(slots=True)
class Server:
    """`names`: whether its dumps carry request ids (plugin) or nothing (plain). Passes are published in `pipeline`'s order."""

    name: str
    names: bool
    chunk: int | None
    boot: int = 0
    counter: int = 0
    queued: dict[str, Prompt] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    pipeline: list[Published | Loss] = field(default_factory=list)

    def compute(self, rid: str, how: str, cut: int) -> None:
        """Run the request and put its passes into the pipeline. `how` names what goes wrong; `cut` where a shared pass ends."""
        prompt = self.queued.pop(rid)
        cached = min(cut, len(prompt) - 1) if how == "cached" else 0
        edges = self._edges(len(prompt), cached, cut)
        passes = [self._pass(rid, prompt, start, stop) for start, stop in pairwise(edges)]
        victim = cut // 2 % len(passes)
        match how:
            case "lost":
                del passes[victim]
            case "refused by the publisher" if self.names:
                passes[victim:] = []
                self.pipeline.append(Loss(rid))
            case "mixed up" if self.names:
                # The rows of another prompt under this request's name.
                start = passes[victim].facts.prefix_len
                other = tuple(token + 1 for token in prompt)
                passes[victim] = self._pass(rid, other, start, start + passes[victim].facts.rows)
            case "doubled":
                passes.insert(victim + 1, passes[victim])
            case "computed twice" if self.names:
                start = passes[victim].facts.prefix_len
                stop = start + passes[victim].facts.rows
                passes.insert(victim + 1, self._pass(rid, prompt, start, stop, bits=f"{rid} again"))
            case "overlapping" if self.names and edges[1] < len(prompt):
                passes[1] = self._pass(rid, prompt, edges[1] - 1, edges[2])
            case "retracted" if self.names:
                # Again from the start, or only what was still missing: then no generation is whole.
                again = self._pass(rid, prompt, edges[victim], len(prompt), bits=f"{rid} after retraction")
                passes[max(victim, 1) :] = [replace(again, facts=replace(again.facts, retraction_count=1))]
        if self.names:
            passes = [replace(each, facts=replace(each.facts, name=f"{rid}/{place}")) for place, each in enumerate(passes)]
        named = frozenset(each.facts.name for each in passes if each.facts.name is not None)
        if how == "unnamed" and named:
            named -= {f"{rid}/{victim}"}
        self.pipeline += passes
        self.decode(rid, prompt)
        self.counter += 1
        self.answers[rid] = Answer(len(prompt), cached, self.counter, named if self.names and how != "silent" else None)

    def _edges(self, rows: int, cached: int, cut: int) -> list[int]:
        """Where the passes of a prompt begin and end. By name, the first may be shared with another prompt, and so be shorter."""
        edges = [cached]
        if self.names and cached < cut < rows:
            edges.append(cut)
        while edges[-1] < rows:
            edges.append(min(rows, edges[-1] + (self.chunk or rows)))
        return edges

    def decode(self, rid: str, prompt: Prompt) -> None:
        """A pass of one row beyond the prompt, as decoding and health checks make them."""
        self.pipeline.append(self._pass(rid, (*prompt, 0), len(prompt), len(prompt) + 1, prompt_len=len(prompt)))

    def foreign(self, rid: str, rows: int, place: int = 0) -> None:
        """Somebody else's request, or a warm-up: its pass falls anywhere among those to be published."""
        self.counter += 1
        foreign = self._pass(rid, (7,) * rows, 0, rows, bits=f"{rid} {self.counter}")
        self.pipeline.insert(place % (len(self.pipeline) + 1), foreign)

    def stutter(self) -> None:
        """Publish the last dump in the pipeline twice."""
        self.pipeline.append(self.pipeline[-1])

    def publish(self, place: int) -> Published | Loss:
        """What becomes visible next. A dump is numbered as it is published."""
        item = self.pipeline.pop(place % len(self.pipeline))
        self.counter += 1
        if isinstance(item, Loss):
            return item
        return replace(item, facts=replace(item.facts, dump_id=f"{self.name}/{self.boot}/{self.counter}", sequence=self.counter))

    def kill(self) -> None:
        """What is not published is lost."""
        self.queued.clear()
        self.answers.clear()
        self.pipeline.clear()
        self.boot += 1

    def _pass(
        self, rid: str, prompt: Prompt, start: int, stop: int, *, bits: str | None = None, prompt_len: int | None = None
    ) -> Published:
        facts = DumpFacts(
            dump_id="",
            sequence=0,
            rows=stop - start,
            nbytes=TOKEN_BYTES * (stop - start),
            tensors=tuple((a.name, a.dtype, (stop - start, *a.row_shape)) for a in ARRAYS),
            capture=CAPTURE,
            model_fingerprint=FINGERPRINT,
        )
        if self.names:
            length = len(prompt) if prompt_len is None else prompt_len
            ids = token_bytes(prompt[start:stop])
            facts = replace(facts, rid=rid, prefix_len=start, prompt_len=length, token_ids=ids)
        return Published(facts, tuple(Row(prompt, index, bits or rid) for index in range(start, stop)))
