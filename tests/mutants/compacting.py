"""Bugs planted in compact stores, and in jobs that compress: what is vouched for, and what is there when."""

from tests.mutants.mutant import Mutant, tests

SHARDS = "clients/python/statetap_client/compact_shards.py"
UNPUBLISHED = "clients/python/statetap_client/unpublished_store.py"
COMPACT = "tests/unit/statetap_client/test_compact.py"
CHUNKS = "service/statetap/adapters/store/compressed_chunks.py"
COMPRESSED = "tests/unit/adapters/store/test_compressed_chunks.py"

MUTANTS = (
    Mutant(
        name="writer-believes-its-codec",
        file=CHUNKS,
        old="        if not _decodes_to(encoded, chunk, decoded):\n",
        new="        if False:\n",
        catcher=tests(COMPRESSED, "-k", "come_back"),
        breaks="a compressed chunk is decoded again and compared before its object is published",
    ),
    Mutant(
        name="writer-leaves-an-earlier-chunks-rows-in-a-gap",
        file=CHUNKS,
        old="        chunk[end:start] = 0\n",
        new="",
        catcher=tests(COMPRESSED, "-k", "gaps"),
        breaks="rows that belong to nobody read as zero, compressed or not",
    ),
    Mutant(
        name="job-forgets-in-a-restart-that-it-compresses",
        file="service/statetap/adapters/ledger/codec.py",
        old='Compression(data.get("compression", Compression.NONE))',
        new="Compression.NONE",
        catcher=tests("tests/property/test_ledger.py", "-k", "survives_json"),
        breaks="a job that is taken up again writes the store that it began",
    ),
    Mutant(
        name="unit-of-a-compressed-job-is-written-uncompressed",
        file="service/statetap/runtime/unit_run.py",
        old="            compression=self.spec.compression,\n",
        new="",
        catcher=tests("tests/unit/runtime/test_admission.py", "-k", "compresses"),
        breaks="a store's objects are what its metadata say of them",
    ),
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
        old="                chunk_codec.decode_into(encoded, chunks[chunk])\n",
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
