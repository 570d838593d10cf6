from __future__ import annotations

from pathlib import Path

import pytest
from statetap_sglang.settings import PluginSettings, SettingsError

ON = {"STATETAP_PLUGIN_DIR": "/dev/shm/statetap"}


def read(**variables: str) -> PluginSettings:
    settings = PluginSettings.from_environment(ON | {f"STATETAP_PLUGIN_{name}": value for name, value in variables.items()})
    assert settings is not None
    return settings


@pytest.mark.parametrize("environment", [{}, {"STATETAP_PLUGIN_DIR": ""}, {"STATETAP_PLUGIN_LAYERS": "nonsense"}])
def test_off_without_a_directory(environment: dict[str, str]) -> None:
    assert PluginSettings.from_environment(environment) is None


def test_defaults() -> None:
    assert read() == PluginSettings(directory=Path("/dev/shm/statetap"))
    assert (read().layers, read().final, read().worker, read().force) == ("eagle3", "post_norm", None, False)


def test_everything_can_be_set() -> None:
    assert read(
        WORKER="w0",
        LAYERS="1, 14,26",
        FINAL="both",
        BUDGET_BYTES="8G",
        RING_BYTES="512MiB",
        PINNED_DUMP_BYTES="4G",
        FORCE="1",
        BOOT_ID="b",
    ) == PluginSettings(
        directory=Path("/dev/shm/statetap"),
        worker="w0",
        layers=(1, 14, 26),
        final="both",
        budget_bytes=8 << 30,
        ring_bytes=512 << 20,
        pinned_dump_bytes=4 << 30,
        force=True,
        boot_id="b",
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"LAYER": "1"}, r"STATETAP_PLUGIN_LAYER is no setting of the plugin; the nearest one is STATETAP_PLUGIN_LAYERS"),
        ({"BUDGET": "1"}, r"the nearest one is STATETAP_PLUGIN_BUDGET_BYTES"),
        ({"LAYERS": "3,1"}, r"ascending"),
        ({"LAYERS": "1,1"}, r"each layer once"),
        ({"LAYERS": "-1"}, r"give layer ids as"),
        ({"LAYERS": ""}, r"give layer ids as"),
        ({"LAYERS": "eagle"}, r"one of eagle3, all, none"),
        ({"FINAL": "postnorm"}, r"one of post_norm, pre_norm, both, none"),
        ({"BUDGET_BYTES": "8 apples"}, r"give a number of bytes"),
        ({"BUDGET_BYTES": "0"}, r"give a number of bytes"),
        ({"RING_BYTES": "1.5G"}, r"give a number of bytes"),
        ({"PINNED_DUMP_BYTES": "yes"}, r"give a number of bytes"),
        ({"FORCE": "perhaps"}, r"must be 1 or 0"),
        ({"DIR": "relative"}, r"absolute path"),
    ],
)
def test_a_wrong_variable_is_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        read(**variables)
    assert f"STATETAP_PLUGIN_{next(iter(variables))}" in str(refused.value)
