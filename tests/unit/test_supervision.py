"""What systemd is told, over a real socket."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from statetap.supervision import ALIVE, READY, Supervisor


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(5)
        yield listening


def environment(heard: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": heard.getsockname(), **more}


def test_it_is_told_what_the_service_says(heard: socket.socket) -> None:
    Supervisor(environment(heard)).tell(READY)
    assert heard.recv(100) == b"READY=1"


def test_an_abstract_socket_is_told_too() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0statetap-test-{os.getpid()}")
        listening.settimeout(5)
        Supervisor({"NOTIFY_SOCKET": f"@statetap-test-{os.getpid()}"}).tell(READY)
        assert listening.recv(100) == b"READY=1"


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": "/nowhere/at/all"}])
async def test_without_one_that_listens_nothing_happens(environment: dict[str, str]) -> None:
    supervisor = Supervisor(environment)
    supervisor.tell(READY)
    await asyncio.wait_for(supervisor.watch(), 5)


async def test_it_hears_in_time_that_the_loop_turns(heard: socket.socket) -> None:
    supervisor = Supervisor(environment(heard, WATCHDOG_USEC="30000", WATCHDOG_PID=str(os.getpid())))
    watching = asyncio.create_task(supervisor.watch())
    for _ in range(3):
        assert await asyncio.to_thread(heard.recv, 100) == ALIVE.encode()
    watching.cancel()


async def test_a_watchdog_of_another_process_is_left_alone(heard: socket.socket) -> None:
    supervisor = Supervisor(environment(heard, WATCHDOG_USEC="30000", WATCHDOG_PID="1"))
    await asyncio.wait_for(supervisor.watch(), 5)
    heard.setblocking(False)
    with pytest.raises(BlockingIOError):
        heard.recv(100)
