"""The planted bugs: what each breaks, where, and which check must notice. Every invariant of the design has one here."""

from tests.mutants import core_evidence, core_machines, data_plane, edges, layers, runtime

CATALOGUE = (
    *core_evidence.MUTANTS,
    *core_machines.MUTANTS,
    *data_plane.MUTANTS,
    *edges.MUTANTS,
    *layers.MUTANTS,
    *runtime.MUTANTS,
)
