"""Bugs planted in the SGLang plugin."""

from tests.mutants.mutant import Mutant, tests

PACKAGE = "clients/sglang/statetap_sglang"
UNIT = "tests/unit/statetap_sglang"
HOOKS = tests(f"{UNIT}/test_sglang_plugin.py")
FAILURES = tests(f"{UNIT}/test_sglang_plugin_failures.py")

MUTANTS = (
    Mutant(
        name="plugin-buffer-changed-after-it-was-enqueued",
        file=f"{PACKAGE}/state_tap.py",
        old="        self._background.publish(PublishPass(arrival, check, dumps))\n",
        new="        self._background.publish(PublishPass(arrival, check, dumps))\n"
        "        for sample in current.samples:\n            self._ring.release(sample.snapshot.span)\n",
        catcher=HOOKS,
        breaks="a snapshot's memory is its own until it is published",
    ),
    Mutant(
        name="plugin-two-rows-swapped",
        file=f"{PACKAGE}/state_tap.py",
        old="tensors[LAST_HIDDEN_STATES].copy_(post_norm[start:stop])",
        new="tensors[LAST_HIDDEN_STATES].copy_(post_norm[[start + 1, start, *range(start + 2, stop)][: stop - start]])",
        catcher=HOOKS,
        breaks="row i of a dump is token i's",
    ),
    Mutant(
        name="plugin-wrong-rank-publishes",
        file=f"{PACKAGE}/sglang_plugin.py",
        old="ranks.attn_tp_rank == 0 and",
        new="ranks.attn_tp_rank >= 0 and",
        catcher=HOOKS,
        breaks="one publisher per sample row (contract §2)",
    ),
    Mutant(
        name="plugin-draft-model-publishes",
        file=f"{PACKAGE}/sglang_plugin.py",
        old="if runner.is_draft_worker or self.open is not None:",
        new="if self.open is not None and not runner.is_draft_worker:",
        catcher=HOOKS,
        breaks="the target model alone is tapped (contract §2)",
    ),
    Mutant(
        name="plugin-layers-off-by-one",
        file=f"{PACKAGE}/layers.py",
        old="return tuple(layer - 1 for layer in inputs)",
        new="return tuple(layer for layer in inputs)",
        catcher=tests(f"{UNIT}/test_layers.py"),
        breaks="layer i is the residual stream after layer i (contract §1; speculators#313)",
    ),
    Mutant(
        name="plugin-believes-the-setter",
        file=f"{PACKAGE}/layers.py",
        old="            if captured == ids:",
        new="            if captured is not None:",
        catcher=tests(f"{UNIT}/test_layers.py"),
        breaks="what the model captures is read back from it, whatever its setter makes of the ids",
    ),
    Mutant(
        name="plugin-last-layer-from-post-norm",
        file=f"{PACKAGE}/state_tap.py",
        old="                tensors[AUX_HIDDEN_STATES][:, -1].copy_(rows)\n",
        new="                tensors[AUX_HIDDEN_STATES][:, -1].copy_(self._norm(rows))\n",
        catcher=HOOKS,
        breaks="the last layer's output is the state before the norm (vllm#46973)",
    ),
    Mutant(
        name="plugin-pre-norm-of-the-previous-pass",
        file=f"{PACKAGE}/sglang_plugin.py",
        old="        tap.take_pre_norm(output[1] if isinstance(output, tuple) else inputs[0])\n",
        new="        state = output[1] if isinstance(output, tuple) else inputs[0]\n"
        "        before, tap.before = getattr(tap, 'before', state), state.clone()\n"
        "        tap.take_pre_norm(before[: len(state)] if len(before) >= len(state) else state)\n",
        catcher=HOOKS,
        breaks="the pre-norm and the post-norm state are of one pass",
    ),
    Mutant(
        name="plugin-never-compares-the-norms",
        file=f"{PACKAGE}/checks.py",
        old="    if not bool(agreed.all()):",
        new="    if False:",
        catcher=tests(f"{UNIT}/test_checks.py"),
        breaks="the pre-norm state, through the norm, is the post-norm state",
    ),
    Mutant(
        name="plugin-publishes-decode-rows",
        file=f"{PACKAGE}/extend_pass.py",
        old="<= request.prompt_len:",
        new="<= request.prompt_len + 1:",
        catcher=tests(f"{UNIT}/test_extend_pass.py"),
        breaks="a row belongs to the prompt iff it ends within it",
    ),
    Mutant(
        name="plugin-cuts-rows-by-shape",
        file=f"{PACKAGE}/state_tap.py",
        old="            start, stop, tensors = sample.rows.start, sample.rows.stop, sample.snapshot.tensors\n",
        new="            stop = post_norm.shape[0]\n            start, tensors = stop - sample.rows.rows, sample.snapshot.tensors\n",
        catcher=HOOKS,
        breaks="rows are cut by the requests' extend lengths: padding comes after them",
    ),
    Mutant(
        name="plugin-hook-fails-the-server",
        file=f"{PACKAGE}/sglang_plugin.py",
        old='            log.exception("%s failed", hook.__name__)\n',
        new="            raise\n",
        catcher=FAILURES,
        breaks="a failed capture never brings the server down (rtp-llm#1312)",
    ),
    Mutant(
        name="plugin-loses-captures-in-silence",
        file=f"{PACKAGE}/state_tap.py",
        old="            self._background.lose(sample.rows.request.rid, current.failure or reason, sample.number)\n",
        new="",
        catcher=FAILURES,
        breaks="a lost capture leaves a reason: never silence (contract §2)",
    ),
    Mutant(
        name="plugin-ring-spans-overlap",
        file=f"{PACKAGE}/ring.py",
        old="            return 0 if nbytes <= oldest.start else None\n",
        new="            return 0 if nbytes <= self.capacity else None\n",
        catcher=tests(f"{UNIT}/test_ring.py"),
        breaks="no snapshot is written over one that is not published yet",
    ),
    Mutant(
        name="plugin-drops-customized-info-of-others",
        file=f"{PACKAGE}/sglang_plugin.py",
        old="{**others, DUMPS_KEY: ",
        new="{DUMPS_KEY: ",
        catcher=HOOKS,
        breaks="another plugin's part of the response stays",
    ),
    Mutant(
        name="reader-ignores-row-checksums",
        file=f"{PACKAGE}/checksum.py",
        old="np.flatnonzero(carried != row_checksums(tensors))",
        new="np.flatnonzero(carried != carried)",
        catcher=tests(f"{UNIT}/test_checksum.py"),
        breaks="aliased or torn buffers cannot pass",
    ),
    Mutant(
        name="publisher-gives-a-number-twice",
        file=f"{PACKAGE}/publisher.py",
        old="        reserved_to = self._next + _NUMBERS_AT_ONCE\n",
        new="        reserved_to = self._next\n",
        catcher=tests(f"{UNIT}/test_publisher.py"),
        breaks="no dump's number is used again (contract §2)",
    ),
)
