"""Bugs planted at the edges: dump format, embedded worker, store, ledger, reader."""

from tests.mutants.mutant import Mutant, tests

STORE = "tests/unit/adapters/store"
LEDGERS = "tests/contract/ledgers"

MUTANTS = (
    Mutant(
        name="dump-replaces-a-dump",
        file="clients/sglang/statetap_sglang/filesystem.py",
        old="_RENAME_NOREPLACE = 1",
        new="_RENAME_NOREPLACE = 0",
        catcher=tests("tests/unit/statetap_sglang"),
        breaks="a dump is published without replacing (contract §2)",
    ),
    Mutant(
        name="store-replaces-an-object",
        file="service/statetap/adapters/store/durable_files.py",
        old="    os.link(temporary, final)\n",
        new="    final.unlink(missing_ok=True)\n    os.link(temporary, final)\n",
        catcher=tests(STORE),
        breaks="invariant 4: a committed object is never replaced",
    ),
    Mutant(
        name="store-takes-nan",
        file="service/statetap/adapters/store/value_checks.py",
        old="if bits.max() >= self._negative_infinity or bits.view(self._signed).max() >= self._infinity:",
        new="if False:",
        catcher=tests(STORE),
        breaks="non-finite states are refused, not trained on (SpecForge#104)",
    ),
    Mutant(
        name="store-takes-zeros",
        file="service/statetap/adapters/store/value_checks.py",
        old="if not (bits[vector] & self._magnitude).any():",
        new="if False:",
        catcher=tests(STORE),
        breaks="all-zero states are refused (speculators#613)",
    ),
    Mutant(
        name="ledger-trusts-a-stale-fence",
        file="service/statetap/adapters/ledger/units.py",
        old='        units.c.fence == bindparam("lease_fence"),\n',
        new="",
        catcher=tests(LEDGERS),
        breaks="invariant 4: what was done under a lost lease does not count",
    ),
    Mutant(
        name="worker-layers-off-by-one",
        file="service/statetap/embedded/capture.py",
        old="self.decoder.layers[i].register_forward_hook(self._layer_hook(i))",
        new="self.decoder.layers[max(i - 1, 0)].register_forward_hook(self._layer_hook(i))",
        catcher=tests("tests/unit/embedded/test_capture.py"),
        breaks="layer i is the residual stream after layer i (contract §1; speculators#313)",
    ),
    Mutant(
        name="worker-pre-norm-for-post-norm",
        file="service/statetap/embedded/capture.py",
        old='tensors[LAST_HIDDEN_STATES] = self._norm["post"]',
        new='tensors[LAST_HIDDEN_STATES] = self._norm["pre"]',
        catcher=tests("tests/unit/embedded/test_capture.py"),
        breaks="last_hidden_states is after the final norm (contract §3)",
    ),
    Mutant(
        name="reader-reads-what-is-not-stored",
        file="clients/python/statetap_client/reader.py",
        old="if self.statuses[index] != Status.STORED:",
        new="if False:",
        catcher=tests("tests/unit/statetap_client/test_reader.py"),
        breaks="readers go by samples/status, for a missing chunk reads as zeros",
    ),
    Mutant(
        name="store-compares-no-checksum",
        file="service/statetap/adapters/store/row_sums.py",
        old="(np.flatnonzero(wanted != sums) + first_row).tolist()",
        new="[]",
        catcher=tests(STORE),
        breaks="aliased or torn buffers cannot pass: each row adds up to what its source computed",
    ),
    Mutant(
        name="store-sums-one-array-only",
        file="service/statetap/adapters/store/row_sums.py",
        old="self._sums[part][row : row + count] += words",
        new="self._sums[part][row : row + count] = words",
        catcher=tests(STORE),
        breaks="a row's checksum covers all its hidden tensors",
    ),
    Mutant(
        name="source-passes-no-checksum-on",
        file="service/statetap/adapters/dumps/held.py",
        old="self.row_checksums = None if checksums is None else checksums.data",
        new="self.row_checksums = None",
        catcher=tests("tests/contract/test_dump_sources.py"),
        breaks="checksums that came with a dump are compared",
    ),
    Mutant(
        name="answers-are-believed-whatever-they-name",
        file="service/statetap/adapters/inference/answers.py",
        old="if not isinstance(names, list) or not all(isinstance(name, str) for name in names):",
        new="if not isinstance(names, list):",
        catcher=tests("tests/unit/adapters/inference/test_answers.py"),
        breaks="names of dumps are strings, or the answer is refused",
    ),
)
