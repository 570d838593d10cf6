"""Bugs planted where samples share a request: what it holds, and that what befalls one does not befall the others."""

from tests.mutants.mutant import Mutant, tests

CORE, RUNTIME = "service/statetap/core", "service/statetap/runtime"

MUTANTS = (
    Mutant(
        name="batch-beyond-its-tokens",
        file=f"{CORE}/batching.py",
        old="            if taken and (total > self.tokens or taken == MOST_SAMPLES):\n                break\n            taken += 1\n",
        new="            taken += 1\n            if total > self.tokens or taken == MOST_SAMPLES:\n                break\n",
        catcher=tests("tests/unit/core/test_batching.py"),
        breaks="a request holds no more tokens than it may, and one sample always",
    ),
    Mutant(
        name="batch-keeps-what-did-not-help",
        file=f"{CORE}/batching.py",
        old="self._go(self._before[0], None, REST_WINDOWS)",
        new="self._go(self.tokens, None, REST_WINDOWS)",
        catcher=tests("tests/unit/core/test_batching.py"),
        breaks="requests are no larger than what keeps the engine busy",
    ),
    Mutant(
        name="batch-loses-its-neighbours",
        file=f"{RUNTIME}/turn.py",
        old="fault = msg.Fault.NOBODY if permanent else msg.Fault.COMPANY",
        new="fault = msg.Fault.SAMPLE if permanent else msg.Fault.COMPANY",
        catcher=tests("tests/unit/runtime/test_batches.py"),
        breaks="a request of several samples that is refused is sent again one by one",
    ),
    Mutant(
        name="batch-aborts-only-its-first",
        file=f"{RUNTIME}/driver.py",
        old="            for rid in self._doubted if self.machine.state is WorkerState.SUSPECT else ():\n",
        new="            for rid in self._doubted[:1] if self.machine.state is WorkerState.SUSPECT else ():\n",
        catcher=tests("tests/unit/runtime/test_batches.py"),
        breaks="after a time-out nothing of the request runs on at the worker",
    ),
    Mutant(
        name="batch-answers-by-position",
        file="service/statetap/adapters/inference/answers.py",
        old="            named[name].append((one, meta))\n",
        new="            named[rids[len(seen) - 1]].append((one, meta))\n",
        catcher=tests("tests/unit/adapters/inference/test_answers.py"),
        breaks="an answer belongs to the sample whose rid it bears, wherever it stands",
    ),
    Mutant(
        name="batch-sends-a-second-request",
        file=f"{RUNTIME}/turn.py",
        old="                    await self._ask(samples)\n",
        new="                    asyncio.create_task(self._ask(samples))\n                    await asyncio.sleep(0)\n",
        catcher=tests("tests/unit/runtime/test_batches.py"),
        breaks="invariant 1: exactly one request is in flight at a worker",
    ),
    Mutant(
        name="batch-takes-answers-first",
        file=f"{RUNTIME}/turn.py",
        old="        if driver.paced or len(answers) < len(samples):\n",
        new="        if True:\n",
        catcher=tests("tests/unit/runtime/test_answers_in_hand.py"),
        breaks="the next request leaves as soon as the response is in",
    ),
    Mutant(
        name="batch-goes-on-before-what-failed",
        file=f"{RUNTIME}/turn.py",
        old="        if driver.paced or len(answers) < len(samples):\n",
        new="        if driver.paced:\n",
        catcher=tests("tests/unit/runtime/test_answers_in_hand.py"),
        breaks="where anything failed, that is dealt with before the next request",
    ),
    Mutant(
        name="batch-hoards-answers",
        file=f"{RUNTIME}/turn.py",
        old="            run.take_answers()\n        run.in_hand",
        new="            pass\n        run.in_hand",
        catcher=tests("tests/unit/runtime/test_answers_in_hand.py"),
        breaks="the answers of one request at most are in hand",
    ),
    Mutant(
        name="batch-drops-answers-with-the-worker",
        file=f"{RUNTIME}/turn.py",
        old="        finally:\n            self._run.take_answers()\n",
        new="        finally:\n            pass\n",
        catcher=tests("tests/unit/runtime/test_answers_in_hand.py"),
        breaks="no answer in hand is lost when its turn ends",
    ),
    Mutant(
        name="batch-drops-answers-with-the-service",
        file=f"{RUNTIME}/unit_run.py",
        old="        with suppress(OSError):  # What cannot be recorded is asked for again.\n            self.take_answers()\n",
        new="",
        catcher=tests("tests/unit/runtime/test_answers_in_hand.py"),
        breaks="no answer in hand is lost when the service stops",
    ),
)
