"""Bugs planted in `statetap doctor`: each lets a wrong worker pass, or harms a sound one."""

from tests.mutants.mutant import Mutant, tests

DOCTOR = "service/statetap/runtime/doctor"
EXAMINATION = "tests/unit/runtime/doctor/test_examination.py"

MUTANTS = (
    Mutant(
        name="doctor-releases-what-is-not-its-own",
        file=f"{DOCTOR}/probing.py",
        old="        elif rid.startswith(RID_PREFIX):\n",
        new="        else:\n",
        catcher=tests(EXAMINATION),
        breaks="invariant 3: dumps of an open unit are released only after its commit",
    ),
    Mutant(
        name="doctor-asks-a-worker-in-use",
        file=f"{DOCTOR}/examination.py",
        old="or not directory.exists or directory.watched:",
        new="or not directory.exists:",
        catcher=tests(EXAMINATION),
        breaks="invariant 1: at most one request in flight per worker",
    ),
    Mutant(
        name="doctor-sends-ids-outside-the-vocabulary",
        file=f"{DOCTOR}/prompts.py",
        old="max(vocab_size // 4 + 1, vocab_size * 3 // 4)",
        new="vocab_size * 3 // 2 + 1",
        catcher=tests("tests/unit/runtime/doctor/test_prompts.py"),
        breaks="an id outside the vocabulary kills an SGLang server",
    ),
    Mutant(
        name="doctor-looks-at-the-largest-row-only",
        file=f"{DOCTOR}/states.py",
        old="return float(max(whole, np.median(rows)))",
        new="return float(whole)",
        catcher=tests("tests/unit/runtime/doctor/test_states.py"),
        breaks="a worker with another model is found, whatever its massive activations",
    ),
    Mutant(
        name="doctor-takes-one-dump-for-two-chunks",
        file=f"{DOCTOR}/probes.py",
        old="            if split.dumps > 1:\n",
        new="            if split.dumps > 99:\n",
        catcher=tests(EXAMINATION),
        breaks="chunked prefill is compared with one-shot prefill (vllm#52909)",
    ),
    Mutant(
        name="doctor-believes-the-flag-of-a-draft",
        file=f"{DOCTOR}/server_settings.py",
        old='    if arguments.get("speculative_draft_model_path"):\n        return True\n',
        new="",
        catcher=tests("tests/unit/runtime/doctor/test_checks.py"),
        breaks="live speculative decoding is refused",
    ),
    Mutant(
        name="doctor-waits-for-ever",
        file=f"{DOCTOR}/probing.py",
        old="            if left <= 0:\n",
        new="            if left <= -1e9:\n",
        catcher=tests(EXAMINATION),
        breaks="a worker that publishes nothing is a finding, not a hang",
    ),
)
