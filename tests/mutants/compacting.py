"""Bugs planted in compact stores: what is vouched for, and what is there when."""

from tests.mutants.mutant import Mutant, tests

SHARDS = "clients/python/statetap_client/compact_shards.py"
UNPUBLISHED = "clients/python/statetap_client/unpublished_store.py"
COMPACT = "tests/unit/statetap_client/test_compact.py"

MUTANTS = (
    Mutant(
        name="compact-launders-a-corrupt-sample",
        file=SHARDS,
        old="if hasher.intdigest() != sample.digest:",
        new="if False:",
        catcher=tests(COMPACT, "-k", "corrupt"),
        breaks="a sample that is not what was recorded is refused by name, not compacted",
    ),
    Mutant(
        name="compact-believes-its-codec",
        file=SHARDS,
        old="                _BLOSC.decode(encoded, out=chunks[chunk])\n",
        new="",
        catcher=tests(COMPACT, "-k", "codec"),
        breaks="digests are taken over what the compressed chunks decode to",
    ),
    Mutant(
        name="compact-names-shards-before-they-are-synced",
        file=SHARDS,
        old="            file.flush()\n            os.fsync(file.fileno())\n",
        new="",
        catcher=tests(COMPACT, "-k", "synced"),
        breaks="every object of a compact store is durable before the store has its name",
    ),
    Mutant(
        name="compact-goes-by-a-status-older-than-its-places",
        file="clients/python/statetap_client/compact.py",
        old="key=lambda key: (not key.startswith(_STATUS), key)",
        new="key=lambda key: (key.startswith(_STATUS), key)",
        catcher=tests(COMPACT, "-k", "while_a_job"),
        breaks="a sample that becomes stored meanwhile has its place and digest, or is not in the copy",
    ),
    Mutant(
        name="compact-leaves-a-killed-runs-leftovers-in",
        file=UNPUBLISHED,
        old="        for left in self.path.iterdir():\n",
        new="        for left in ():\n",
        catcher=tests(COMPACT, "-k", "killed"),
        breaks="an interrupted run can be started again",
    ),
    Mutant(
        name="compact-makes-a-store-of-it-before-it-is-whole",
        file=UNPUBLISHED,
        old="        self.write(layout.METADATA_NAME, root_document)\n        for folder",
        new="        for folder",
        catcher=tests(COMPACT, "-k", "synced"),
        breaks="what is published is a store, its root's metadata written last",
    ),
)
