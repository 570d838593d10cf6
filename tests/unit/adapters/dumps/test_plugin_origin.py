"""What a dump is comes from the tap that published it: its beacon, and nobody else's."""

from __future__ import annotations

from statetap.adapters.dumps import PluginDumpSource
from statetap.ports import DumpRejected

from tests.fakes.dumps import Listener, Publish, publish


async def test_a_dump_is_told_by_its_own_tap(source: PluginDumpSource, tap: Publish, listener: Listener) -> None:
    """Two boots under one name: what each captured stands with its dumps, whoever was announced last."""
    for boot, layers in (("boot1", (1, 3)), ("boot2", (0, 2))):
        publish(tap(boot_id=boot, aux_layer_ids=layers, model_fingerprint=f"weights of {boot}"), boot, boot_id=boot)
    await source.start(listener)
    told = {dump.facts.rid: (dump.facts.capture.aux_layer_ids, dump.facts.model_fingerprint) for dump in listener.dumps}
    assert told == {"boot1": ((1, 3), "weights of boot1"), "boot2": ((0, 2), "weights of boot2")}


async def test_dumps_of_a_dead_tap_that_never_announced_itself_are_nobodys(
    source: PluginDumpSource, tap: Publish, listener: Listener
) -> None:
    publisher = tap(announced=False)
    path = publish(publisher)
    publisher.close()
    await source.start(listener)
    assert [type(event) for event in listener.events] == [DumpRejected]
    assert not path.exists()
