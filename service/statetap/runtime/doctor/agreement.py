"""Several workers, one prompt: whether their states agree, and what tells the odd one out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from statetap.runtime.doctor.findings import Finding, error, note, ok
from statetap.runtime.doctor.inputs import Announced
from statetap.runtime.doctor.states import States, relative_error, relative_errors, rounding, told

CHECK = "agreement"
NO_JOB = "no job can use both"

_SAID: Mapping[str, tuple[Callable[[Announced], object], str]] = {
    "model fingerprint": (lambda said: said.model_fingerprint, "serve the same weights from both"),
    "dtype": (lambda said: said.dtype, "start both servers with one --dtype"),
    "layers": (lambda said: list(said.aux_layer_ids), "set one STATETAP_PLUGIN_LAYERS for both servers"),
    "final state": (lambda said: said.final, "set one STATETAP_PLUGIN_FINAL for both servers"),
    "vocabulary": (lambda said: said.vocab_size, "serve the same model from both"),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """What one worker announced, and the states that it gave for the prompt that all were sent; None if it gave none."""

    worker: str
    announced: Announced
    states: States | None


def examine_agreement(workers: Sequence[Seen]) -> list[Finding]:
    """Each worker held against the one that most others agree with; nothing where there is a single worker."""
    if len(workers) < 2:
        return []
    reference = max(workers, key=lambda one: sum(_agree(one, other) for other in workers))
    findings: list[Finding] = []
    for worker in workers:
        if worker is not reference:
            findings += _announcements(worker, reference)
            findings += _states(worker, reference)
    return findings


def _agree(one: Seen, other: Seen) -> bool:
    if one.states is None or other.states is None or _announcements(one, other):
        return False
    bound = rounding(one.announced.dtype, other.announced.dtype)
    return all(error <= bound for error in relative_errors(one.states, other.states).values())


def _announcements(worker: Seen, reference: Seen) -> list[Finding]:
    findings = []
    for what, (of, fix) in _SAID.items():
        mine, theirs = of(worker.announced), of(reference.announced)
        if mine != theirs:
            said = f"{what}: {worker.worker} says {mine}, {reference.worker} says {theirs}; {NO_JOB}"
            findings.append(error(CHECK, said, fix))
    return findings


def _states(worker: Seen, reference: Seen) -> list[Finding]:
    both = f"{worker.worker} and {reference.worker}"
    if worker.states is None or reference.states is None:
        return [note(CHECK, f"{both}: not compared, for lack of states", "see to the errors above first")]
    errors = relative_errors(worker.states, reference.states)
    if not errors:
        return [note(CHECK, f"{both}: not compared, for they capture no state in common")]
    bound = rounding(worker.announced.dtype, reference.announced.dtype)
    seen = f"{both}, the same prompt: relative error {told(errors)} (up to {bound:g} is rounding)"
    if all(found <= bound for found in errors.values()):
        return [ok(CHECK, seen)]
    return [
        error(
            CHECK,
            seen + _explanation((worker.worker, worker.states), (reference.worker, reference.states), bound),
            f"one of the two has other weights, layers or norms than it says; no store may mix them: compare {both} with a third "
            "worker, or with `statetap verify --model`",
        )
    ]


def _explanation(one: tuple[str, States], another: tuple[str, States], bound: float) -> str:
    """Which states of one are the other's under another name: layers off by one, a norm applied or not."""
    found = [
        f"{one[0]}'s {name} is {another[0]}'s {other}"
        for name, values in one[1].items()
        for other, wanted in another[1].items()
        if name != other and relative_error(values, wanted) <= bound
    ]
    return f"; {', '.join(found)}" if found else ""
