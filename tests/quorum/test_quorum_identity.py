"""Who is of this run, and that nobody else ends it."""

import socket
import threading
import uuid
from datetime import timedelta

import pytest
from torch.distributed import HashStore
from torchft.coordination import LighthouseServer, ManagerClient, ManagerServer

from everstep.quorum import membership
from everstep.quorum.identity import StrangerError, bind_address, group_of, open_note, replica_id, seal_note
from everstep.quorum.membership import Membership, QuorumUnavailable

TOKEN, OTHER = bytes(range(32)), bytes(32)
SOON = timedelta(seconds=10)


def test_an_id_names_its_group_to_members_of_the_run_only():
    ids = [replica_id(TOKEN, group) for group in (0, 7, 999_999)]
    assert [group_of(TOKEN, name) for name in ids] == [0, 7, 999_999]
    assert sorted(ids) == ids, "torchft sorts them as text"
    assert replica_id(TOKEN, 7) != ids[1], "a group and its predecessor"
    with pytest.raises(StrangerError, match="End that job"):
        group_of(OTHER, ids[1])


@pytest.mark.parametrize(
    "stranger",
    [
        "",
        "stray-job_0",
        f"000000:{uuid.uuid4()}",
        f"000000:{uuid.uuid4()}:{'0' * 32}",
        replica_id(OTHER, 0),
        replica_id(TOKEN, 1).replace("000001", "000000", 1),
        replica_id(TOKEN, 1) + "\n",
        "٣" * 6 + replica_id(TOKEN, 1)[6:],
        "x" * 10_000,
        "\x1b[2J",
    ],
    ids=range(10),
)
def test_what_is_no_id_of_the_run_is_refused_in_a_sentence_without_escapes(stranger):
    with pytest.raises(StrangerError) as refusal:
        group_of(TOKEN, stranger)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 400


def test_a_note_is_good_for_its_step_and_group_only():
    sealed = seal_note(TOKEN, 5, 2, b"state")
    assert open_note(TOKEN, 5, 2, sealed) == b"state"
    assert open_note(TOKEN, 5, 2, seal_note(TOKEN, 5, 2, b"")) == b""
    for token, step, group, note in [
        (OTHER, 5, 2, sealed),
        (TOKEN, 6, 2, sealed),
        (TOKEN, 5, 1, sealed),
        (TOKEN, 5, 2, sealed[:-1]),
        (TOKEN, 5, 2, b"state"),
        (TOKEN, 5, 2, sealed[:-1] + b"x"),
    ]:
        with pytest.raises(StrangerError):
            open_note(token, step, group, note)


@pytest.fixture
def lighthouse():
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=500, quorum_tick_ms=50, heartbeat_timeout_ms=2000
    )
    yield server.address()
    server.shutdown()


def a_member(lighthouse, group=0, host="127.0.0.1"):
    return Membership(
        group=group,
        rank=0,
        world_size=1,
        store=HashStore(),
        incarnation="0",
        store_address="127.0.0.1:1",
        find_lighthouse=lambda: lighthouse,
        host=host,
        token=TOKEN,
        connect_timeout=SOON,
    )


def test_a_stray_replica_makes_quorums_unavailable_and_ends_nobody(lighthouse, monkeypatch):
    monkeypatch.setattr(membership, "STRANGER_PAUSE_S", 0.0)
    member = a_member(lighthouse)
    assert member.join(step=0, failures=0, metadata="", timeout=SOON).groups == (0,)
    stray = ManagerServer(
        replica_id="stray-job_0",
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        bind="127.0.0.1:0",
        store_addr="127.0.0.1:2",
        world_size=1,
        heartbeat_interval=timedelta(milliseconds=100),
        connect_timeout=SOON,
        quorum_retries=0,
    )
    client = ManagerClient(stray.address(), connect_timeout=SOON)

    stop = threading.Event()

    def ask():
        while not stop.is_set():
            try:
                client._quorum(
                    group_rank=0,
                    step=10**6,
                    checkpoint_metadata="",
                    shrink_only=False,
                    timeout=timedelta(seconds=1),
                    init_sync=False,
                    commit_failures=0,
                )
            except Exception:  # noqa: BLE001  of the stray, whatever it is
                continue

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    reasons = []
    for _ in range(20):
        try:
            member.join(step=1, failures=0, metadata="", timeout=SOON)
        except QuorumUnavailable as error:
            reasons.append(str(error))
            break
    assert "stray-job_0" in reasons[0]
    assert "some other job was given this run's lighthouse address" in reasons[0]
    stop.set()
    stray.shutdown()
    thread.join(5)
    member.leave()


def test_a_manager_listens_on_the_address_it_is_reached_under_and_no_other(lighthouse):
    assert bind_address("localhost") in ("127.0.0.1:0", "[::1]:0")
    assert bind_address("127.0.0.2") == "127.0.0.2:0"
    assert bind_address("::1") == "[::1]:0"
    member = a_member(lighthouse, host="127.0.0.2")
    port = int(member._server.address().rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2)
    socket.create_connection(("127.0.0.2", port), timeout=2).close()
    member.leave()
