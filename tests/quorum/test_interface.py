"""The interface that Gloo, NCCL, stores and heals use is the one of bind_host, wherever the host's name points."""

import os
import socket
import subprocess
import sys

import pytest
from psutil import net_if_addrs

from everstep.quorum.interface import interface_of

CARDS = {one.address: name for name, found in net_if_addrs().items() for one in found if one.family == socket.AF_INET}
OTHERS = [address for address in CARDS if not address.startswith("127.")]


@pytest.mark.parametrize(("address", "name"), CARDS.items())
def test_each_address_of_this_machine_has_its_interface(address, name):
    assert interface_of(address) == (name, address)


@pytest.mark.parametrize("host", ["", socket.gethostname()])
def test_a_name_that_points_to_loopback_means_the_way_to_others(monkeypatch, host):
    """Debian's /etc/hosts points the host's name to 127.0.1.1."""
    pointing = socket.getaddrinfo("127.0.1.1", None, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **more: pointing)
    assert interface_of(host).address in (OTHERS or ["127.0.1.1"])


@pytest.mark.parametrize("address", OTHERS or ["127.0.0.1"])
def test_gloo_listens_there(address):
    """In a separate process, as Gloo reads the environment only once."""
    code = (
        "import sys; from datetime import timedelta\n"
        "from everstep.quorum.interface import use_interface\n"
        "host = use_interface(sys.argv[1]).address\n"
        "import torch.distributed as dist\n"
        "from everstep.quorum.process_group import Place, RankColumn\n"
        "wait = timedelta(seconds=20)\n"
        "store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)\n"
        "column = RankColumn('gloo', column=0, host=host, connect_timeout=wait, token=bytes(32))\n"
        "column.connect(Place('a', f'{host}:{store.port}', 0, 0, (column.address,)))\n"
        "print(column.address.rpartition(':')[0], column._queues[0].communicator._listens[0])\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    done = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout.split() == [address, address], done.stderr
