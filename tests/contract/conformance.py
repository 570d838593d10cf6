"""`python -m tests.contract.conformance [SECONDS]`: the whole OpenAPI document against a real service with an embedded worker.

The service has keys, so that what is said of them is tried as well. Exit status 0: no answer was a fault, and every one is as
the document says.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from statetap.commands.key import new_key
from statetap_client.sync import SyncStatetapClient

from tests.fakes.cluster import Cluster, cluster, small_model, token_samples

# That a request as the document allows it may be refused all the same is no fault: there may be no such job, or no room.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "ignored_auth",
)


class KeyedCluster(Cluster):
    """A cluster whose service wants a key."""

    key = new_key()

    def _settings(self) -> str:
        digest = hashlib.sha256(self.key.encode()).hexdigest()
        roots = json.dumps([str(self.folder)])
        return f'dataset_roots = {roots}\n{super()._settings()}[[keys]]\nname = "test"\nscope = "admin"\nsha256 = "{digest}"\n'


def conforms(folder: Path, examples: int, *, max_seconds: int) -> subprocess.CompletedProcess[str]:
    """Run schemathesis; its report is the output."""
    with cluster(folder, small_model(folder / "model")) as plain:
        running = KeyedCluster(folder, plain.dumps, plain.model)
        try:
            running.start_worker("w0")
            running.start_service().close()
            with SyncStatetapClient(running.url, api_key=running.key) as client:
                running.wait_for_workers(client, "w0")
                dataset = client.create_dataset(token_samples(6), name="known")
                job = running.run_job(client, token_samples(6), "known.zarr")
            known = {"job": job.id, "dataset": dataset.id, "worker": "w1"}
            ran = _schemathesis(running.url, running.key, known, examples, max_seconds)
            faults = running.log("api.request_failed")
            return ran if not faults else subprocess.CompletedProcess(ran.args, 1, f"{ran.stdout}\n{faults}", ran.stderr)
        finally:
            running.stop()


def _schemathesis(url: str, key: str, known: dict[str, str], examples: int, max_seconds: int) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json", "--no-color"]
    command += ["-H", f"Authorization: Bearer {key}", "--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing"]
    command += ["--max-examples", str(examples), "--generation-deterministic", "--max-time", str(max_seconds), "--no-shrink"]
    command += ["--request-timeout", "30", "--warnings", "off"]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.contract.openapi_hooks", "STATETAP_TEST_IDS": json.dumps(known)}
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as empty:  # it keeps what it learns beside where it runs
        return subprocess.run(
            command, env=os.environ | hooks | {"PYTHONPATH": path}, capture_output=True, text=True, check=False, cwd=empty
        )


def main() -> int:
    # Within its time schemathesis goes on with new examples, however few it is asked for at once.
    max_seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    with tempfile.TemporaryDirectory(prefix="statetap-conformance-") as folder:
        ran = conforms(Path(folder), 100, max_seconds=max_seconds)
    print(ran.stdout, ran.stderr)
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
