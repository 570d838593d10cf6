"""The planted bugs: what each breaks, where, and which check must notice. Every invariant of the design has one here."""

from tests.mutants import (
    blame,
    chaos,
    compacting,
    core_evidence,
    core_machines,
    data_plane,
    doctor,
    edges,
    layers,
    norms,
    pinned,
    plugin,
    recycling,
    runtime,
    security,
    soak,
)

CATALOGUE = (
    *blame.MUTANTS,
    *chaos.MUTANTS,
    *compacting.MUTANTS,
    *core_evidence.MUTANTS,
    *core_machines.MUTANTS,
    *data_plane.MUTANTS,
    *doctor.MUTANTS,
    *edges.MUTANTS,
    *layers.MUTANTS,
    *norms.MUTANTS,
    *pinned.MUTANTS,
    *plugin.MUTANTS,
    *recycling.MUTANTS,
    *runtime.MUTANTS,
    *security.MUTANTS,
    *soak.MUTANTS,
)
