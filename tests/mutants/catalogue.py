"""The planted bugs: what each breaks, where, and which check must notice. Every invariant of the design has one here."""

from tests.mutants import chaos, core_evidence, core_machines, edges, layers, runtime

CATALOGUE = (*chaos.MUTANTS, *core_evidence.MUTANTS, *core_machines.MUTANTS, *edges.MUTANTS, *layers.MUTANTS, *runtime.MUTANTS)
