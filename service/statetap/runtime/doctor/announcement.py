"""What a worker announces (its taps' beacons, or its declaration) held against what its server says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import statetap_sglang
from statetap_sglang.beacon import Beacon
from statetap_sglang.format import FORMAT_VERSION

from statetap.core.spec import CaptureSpec, eagle3_layers, preset
from statetap.runtime.doctor.findings import Finding, error, note, ok, warning
from statetap.runtime.doctor.inputs import Announced, DirectoryFacts, capture_of

FINGERPRINT_SHOWN = 16
PRESETS = ("eagle3", "speculators", "all-trainers", "mtp")
INSTALL = (
    "for SGLang: install statetap-sglang in the server's environment, set STATETAP_PLUGIN_DIR to the dump root and "
    "STATETAP_PLUGIN_WORKER to the worker's name, and look for the plugin's own words in the server's log"
)


def examine_directory(directory: DirectoryFacts, *, plain: bool) -> list[Finding]:
    """Whether the dump directory is there, and whether somebody publishes in it."""
    if not directory.exists:
        beside = f"; beside it there are {', '.join(directory.neighbours)}" if directory.neighbours else ""
        return [
            error(
                "dump_directory",
                f"{directory.path} does not exist here{beside}",
                "name the directory that the server publishes in, under the worker's own name; in containers, share /dev/shm "
                "between server and service (docker run --ipc, or one volume)",
            )
        ]
    findings = [
        error("dump_directory", fault, "end the server and start it again, with the statetap-sglang of this service's version")
        for fault in directory.faults
    ]
    findings += [
        error("plugin", f"a tap refuses to publish: {reason}", "change what it names, and start the server again")
        for reason in directory.refusals
    ]
    if not plain and not directory.taps and not findings:
        findings.append(error("plugin", f"no tap is alive in {directory.path}: nobody publishes there", INSTALL))
    return findings or [ok("dump_directory", f"{directory.path} on {directory.filesystem or 'an unknown file system'}")]


def examine_taps(taps: tuple[Beacon, ...], arguments: Mapping[str, Any]) -> list[Finding]:
    """Versions, and whether the taps are those of one boot of this server."""
    if not taps:
        return []
    first, *others = taps
    findings = [_versions(first, arguments)]
    boots = {tap.boot_id for tap in taps}
    if len(boots) > 1:
        findings.append(
            error(
                "plugin",
                f"{len(boots)} servers publish under this worker's name",
                "give each server a name of its own (STATETAP_PLUGIN_WORKER), and end servers that are not wanted",
            )
        )
    elif len(taps) < first.dp_size and (arguments.get("nnodes") or 1) == 1:
        findings.append(
            error(
                "plugin",
                f"{len(taps)} of {first.dp_size} data-parallel ranks publish",
                "look into the server's log for the other ranks; without their taps, requests that go to them are lost",
            )
        )
    if any(_captured(tap) != _captured(first) for tap in others):
        findings.append(
            error(
                "layers",
                "the worker's taps do not capture the same",
                "start the server again, with one set of STATETAP_PLUGIN_LAYERS and STATETAP_PLUGIN_FINAL for all ranks",
            )
        )
    return findings


def _captured(tap: Beacon) -> tuple[object, ...]:
    return tap.aux_layer_ids, tap.final, tap.model_fingerprint, tap.dtype


def _versions(tap: Beacon, arguments: Mapping[str, Any]) -> Finding:
    serves = str(arguments.get("version") or tap.sglang_version)
    seen = f"plugin {tap.plugin_version}, dump format {tap.format_version}, server {serves}"
    if serves != tap.sglang_version:
        return error(
            "versions",
            f"{seen}; but the tap is of a server {tap.sglang_version}",
            "the URL and the dump directory are of different servers: correct one of them",
        )
    if tap.plugin_version != statetap_sglang.__version__:
        return warning(
            "versions",
            f"{seen}; this service brings statetap-sglang {statetap_sglang.__version__}",
            f"install statetap-sglang=={statetap_sglang.__version__} in the server's environment",
        )
    if serves.startswith("embedded-"):
        return note("versions", f"{seen}: the embedded worker, not SGLang")
    return ok("versions", f"{seen} (this service reads format {FORMAT_VERSION})")


def examine_announcement(announced: Announced, arguments: Mapping[str, Any], model: Mapping[str, Any]) -> list[Finding]:
    """Model, dtype, layers, prefix cache, chunking and context, each against the server's word where it gives one."""
    findings = [
        _model(announced, model.get("model_path") or arguments.get("model_path")),
        _dtype(announced, arguments.get("dtype")),
        _layers(announced),
        _prefix_cache(announced, arguments.get("disable_radix_cache")),
        _chunking(announced, arguments.get("chunked_prefill_size")),
    ]
    if announced.context_length is not None:
        findings.append(ok("context", f"{announced.context_length:,} tokens at most"))
    return findings


def _model(announced: Announced, serves: object) -> Finding:
    if serves is not None and serves != announced.model_path:
        return error(
            "model",
            f"the server serves {serves!r}, its dumps are said to be of {announced.model_path!r}",
            "one of the two is not this worker's: correct its URL or its dump directory, or what is declared",
        )
    return ok("model", f"{announced.model_path}, fingerprint {announced.model_fingerprint[:FINGERPRINT_SHOWN]}")


def _dtype(announced: Announced, serves: object) -> Finding:
    named = str(serves).removeprefix("torch.")
    if named in ("bfloat16", "float16", "float32") and named != announced.dtype:
        return error(
            "dtype",
            f"the server computes in {named}, its dumps are said to be {announced.dtype}",
            f"declare {named}, or start the server with --dtype {announced.dtype}",
        )
    if announced.dtype == "float32":
        return note(
            "dtype", "float32: twice the bytes of bfloat16", "start the server with --dtype bfloat16 unless float32 is wanted"
        )
    return ok("dtype", announced.dtype)


def _layers(announced: Announced) -> Finding:
    capture = capture_of(announced)
    layers = ", ".join(map(str, capture.aux_layer_ids)) or "none"
    seen = f"layers {layers} of {announced.num_layers} (from 0), final {capture.final}"
    named = _preset(capture, announced.num_layers)
    if named is not None:
        return ok("layers", f"{seen}: the preset {named}")
    eagle3 = ", ".join(map(str, eagle3_layers(announced.num_layers)))
    return note("layers", f"{seen}: no preset of Statetap's", f"check that the drafter wants these; EAGLE-3's are {eagle3}")


def _preset(capture: CaptureSpec, num_layers: int) -> str | None:
    return next((name for name in PRESETS if preset(name, num_layers) == capture), None)


def _prefix_cache(announced: Announced, disabled: object) -> Finding:
    enabled = not disabled if isinstance(disabled, bool) else getattr(announced, "radix_cache", None)
    if enabled is None:
        return note("prefix_cache", "the server does not say whether it has one")
    if enabled:
        return warning(
            "prefix_cache",
            "on: rows that hit it are not computed, so not published; each request needs a cache key of its own, and old prompts "
            "fill the memory",
            "start the server with --disable-radix-cache",
        )
    return ok("prefix_cache", "off")


def _chunking(announced: Announced, serves: object) -> Finding:
    declared = announced.chunked_prefill_size
    if isinstance(serves, int):
        actual = serves if serves > 0 else None
        if actual != declared:
            return error(
                "chunking",
                f"the server splits prompts after {_tokens(actual)}, its dumps are said to be split after {_tokens(declared)}",
                "declare chunked_prefill_size as the server has it, or start the server with "
                f"--chunked-prefill-size {declared or -1}",
            )
    if declared is None:
        return ok("chunking", "prompts are never split")
    return note(
        "chunking",
        f"prompts are split after {declared:,} tokens",
        "where memory allows, start the server with --chunked-prefill-size -1: one dump a sample, computed in one pass",
    )


def _tokens(chunk: int | None) -> str:
    return "no number of tokens" if chunk is None else f"{chunk:,} tokens"
