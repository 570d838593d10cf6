"""How others store the same samples: their published formats, their default settings, our loops. All end with fsync."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import safetensors.torch
import tensorstore
import torch
import zarr
from statetap.core.placement import choose_geometry

from tests.bench.material import Material, fsync_all


def copy(material: Material, target: Path) -> None:
    """`cp` of the dumps: the same bytes, and nothing else."""
    target.mkdir()
    subprocess.run(["cp", *material.files, target], check=True)
    fsync_all(target.iterdir())


def specforge(material: Material, target: Path) -> None:
    """SpecForge's `prepare_hidden_states.py`: `torch.save` of one dict a sample, `data_<i>.ckpt`."""
    target.mkdir()
    for number, tensors in enumerate(material.tensors()):
        sample = {
            "input_ids": tensors["token_ids"].long(),
            "loss_mask": torch.ones(material.rows, dtype=torch.long),
            "hidden_state": tensors["last_hidden_states"],
            "aux_hidden_state": tensors["aux_hidden_states"].flatten(1),
        }
        torch.save(sample, target / f"data_{number}.ckpt")
    fsync_all(target.iterdir())


def speculators(material: Material, target: Path, shared: Path) -> None:
    """speculators' offline generation: vLLM writes safetensors to /dev/shm, one file a sample, and they are moved from there.

    There all layers are one tensor; here they stay two, which spares it a copy.
    """
    target.mkdir()
    for number, tensors in enumerate(material.tensors()):
        made = shared / f"hs_{number}.safetensors"
        safetensors.torch.save_file(tensors, made)
        shutil.move(made, target / made.name)
    fsync_all(target.iterdir())


def zarr_python(material: Material, target: Path) -> None:
    """zarr-python's own writing: sharded, uncompressed chunks, the same geometry, whole shards one after the other."""
    geometry = choose_geometry(material.arrays)
    group = zarr.create_group(target)
    samples = material.tensors()
    for array in material.arrays:
        units = material.units(target)
        whole = group.create_array(
            array.name,
            shape=(len(units) * units[0][1].rows, *array.row_shape),
            chunks=(geometry.rows_per_chunk, *array.row_shape),
            shards=(geometry.rows_per_shard, *array.row_shape),
            dtype="uint16",
            compressors=None,
            filters=None,
        )
        per_unit = len(units[0][0])
        for number, (dumps, unit) in enumerate(units):
            rows = torch.cat([samples[number * per_unit + i][array.name] for i in range(len(dumps))])
            whole[unit.row_start : unit.row_start + len(rows)] = rows.view(torch.uint16).numpy()
    fsync_all(path for path in target.rglob("*") if path.is_file())


def tensorstore_sharded(material: Material, target: Path) -> None:
    """tensorstore's own writing of the same arrays: zarr3 driver, sharding codec, one write a unit."""
    geometry = choose_geometry(material.arrays)
    samples = material.tensors()
    for array in material.arrays:
        units = material.units(target)
        whole = tensorstore.open(_tensorstore_spec(target / array.name, array.row_shape, geometry, units), create=True).result()
        per_unit = len(units[0][0])
        for number, (dumps, unit) in enumerate(units):
            rows = torch.cat([samples[number * per_unit + i][array.name] for i in range(len(dumps))])
            whole[unit.row_start : unit.row_start + len(rows)].write(rows.view(torch.uint16).numpy()).result()
    fsync_all(path for path in target.rglob("*") if path.is_file())


def _tensorstore_spec(path: Path, row_shape: tuple[int, ...], geometry: Any, units: list[Any]) -> dict[str, Any]:
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    sharding = {
        "chunk_shape": [geometry.rows_per_chunk, *row_shape],
        "codecs": codecs,
        "index_codecs": [*codecs, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path)},
        "metadata": {
            "shape": [len(units) * units[0][1].rows, *row_shape],
            "data_type": "uint16",
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [geometry.rows_per_shard, *row_shape]},
            },
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        },
    }
