"""Who is of this run, and that nobody else ends it."""

import contextlib
import threading
from datetime import timedelta

import pytest
from torchft.coordination import LighthouseClient, LighthouseServer

from everstep.quorum.identity import (
    StrangerError,
    check_saying,
    open_note,
    read_id,
    replica_id,
    saying_code,
    seal_note,
)
from everstep.quorum.membership import Membership
from everstep.step.interfaces import QuorumUnavailable
from everstep.step.quorum import NO_STATE, Request, encode

TOKEN, OTHER = bytes(range(32)), bytes(32)
SOON = timedelta(seconds=10)


LIFE = "0123456789abcdef"


def test_an_id_names_its_group_to_members_of_the_run_only():
    ids = [replica_id(TOKEN, group, LIFE) for group in (0, 7, 999_999)]
    assert [read_id(TOKEN, name) for name in ids] == [(0, LIFE), (7, LIFE), (999_999, LIFE)]
    assert sorted(ids) == ids, "torchft sorts them as text"
    with pytest.raises(StrangerError, match="End that job"):
        read_id(OTHER, ids[1])


@pytest.mark.parametrize(
    "stranger",
    [
        "",
        "stray-job_0",
        f"000000:{LIFE}",
        f"000000:{LIFE}:{'0' * 32}",
        replica_id(OTHER, 0, LIFE),
        replica_id(TOKEN, 1, LIFE).replace("000001", "000000", 1),
        replica_id(TOKEN, 1, LIFE).replace(LIFE, LIFE[::-1]),
        replica_id(TOKEN, 1, LIFE) + "\n",
        "٣" * 6 + replica_id(TOKEN, 1, LIFE)[6:],
        "x" * 10_000,
        "\x1b[2J",
    ],
    ids=range(11),
)
def test_what_is_no_id_of_the_run_is_refused_in_a_sentence_without_escapes(stranger):
    with pytest.raises(StrangerError) as refusal:
        read_id(TOKEN, stranger)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 400


def test_a_saying_is_good_for_its_replica_only():
    replica, other = (replica_id(TOKEN, group, LIFE) for group in (1, 2))
    code = saying_code(TOKEN, replica, "text")
    assert check_saying(TOKEN, replica, "text", code) == "text"
    for token, who, text, shown in [
        (OTHER, replica, "text", code),
        (TOKEN, other, "text", code),
        (TOKEN, replica, "other text", code),
        (TOKEN, replica, "text", code[:-1]),
        (TOKEN, replica, "text", "é" * 32),
        (TOKEN, replica, "text", None),
        (TOKEN, replica, ["text"], code),
    ]:
        with pytest.raises(StrangerError):
            check_saying(token, who, text, shown)


def test_a_note_is_good_for_its_place_only():
    sealed = seal_note(TOKEN, b"5 of 2", b"state")
    assert open_note(TOKEN, b"5 of 2", sealed) == b"state"
    assert open_note(TOKEN, b"5 of 2", seal_note(TOKEN, b"5 of 2", b"")) == b""
    for token, place, note in [
        (OTHER, b"5 of 2", sealed),
        (TOKEN, b"5 of 3", sealed),
        (TOKEN, b"5 of 2", sealed[:-1]),
        (TOKEN, b"5 of 2", b"state"),
        (TOKEN, b"5 of 2", sealed[:-1] + b"x"),
        (TOKEN, b"5 of 2s", sealed.replace(b"state", b"tate")),
    ]:
        with pytest.raises(StrangerError):
            open_note(token, place, note)


@pytest.fixture
def lighthouse():
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=500, quorum_tick_ms=50, heartbeat_timeout_ms=2000
    )
    yield server.address()
    server.shutdown()


def a_member(lighthouse, group=0, token=TOKEN):
    member = Membership(group=group, life=LIFE, token=token, find_lighthouse=lambda: lighthouse, connect_timeout=SOON)
    member.follow()
    return member


def a_request(group=0, number=1):
    return Request(group, LIFE, number, 0, 0, False, NO_STATE, 0, False, "", "127.0.0.1:1", ("127.0.0.1:2",))


def asked(client, replica, data, stop):
    while not stop.is_set():
        with contextlib.suppress(Exception):  # of the stray, whatever it is
            client.heartbeat(replica, timeout=SOON)
            client.quorum(
                replica_id=replica,
                timeout=timedelta(seconds=1),
                store_address="127.0.0.1:1",
                step=10**6,
                world_size=1,
                data=data,
            )


GOOD_ID = replica_id(TOKEN, 3, LIFE)
GOOD_TEXT = encode(a_request(3))


@pytest.mark.parametrize(
    ("stray", "data"),
    [
        ("stray-job_0", None),
        ("stray-job_0", {"everstep": GOOD_TEXT}),
        (GOOD_ID, None),
        (GOOD_ID, {"everstep": GOOD_TEXT, "code": "0" * 32}),
        (GOOD_ID, {"everstep": encode(a_request(4)), "code": saying_code(TOKEN, GOOD_ID, encode(a_request(4)))}),
    ],
    ids=["stray", "stray with a request", "no request", "forged request", "another's request"],
)
def test_a_stray_replica_makes_quorums_unavailable_and_ends_nobody(lighthouse, stray, data):
    member = a_member(lighthouse)
    assert [m.group for m in member.ask(a_request(), SOON)[1]] == [0]
    client, stop = LighthouseClient(lighthouse, SOON), threading.Event()
    thread = threading.Thread(target=asked, args=(client, stray, data, stop), daemon=True)
    thread.start()
    reasons = []
    for number in range(2, 30):
        try:
            member.ask(a_request(number=number), timedelta(seconds=1))
        except QuorumUnavailable as error:
            reasons.append(str(error))
            break
    stop.set()
    thread.join(5)
    assert reasons[0].isprintable()
    assert ("stray-job_0" if stray == "stray-job_0" else "000003") in reasons[0]
    member.leave()


def test_who_poses_as_the_runs_own_lighthouse_is_not_asked(lighthouse):
    """Another user who took the port of one that died: torchft's would be believed, each group could be told another
    quorum of genuine members."""
    member = Membership(
        group=0, life=LIFE, token=TOKEN, find_lighthouse=lambda: lighthouse, connect_timeout=SOON, gated=lambda: True
    )
    member.follow()
    with pytest.raises(QuorumUnavailable, match="does not answer as this run's lighthouse does"):
        member.ask(a_request(), timedelta(seconds=2))
    assert [one.group for one in a_member(lighthouse).ask(a_request(), SOON)[1]] == [0], (
        "where it was chosen by the user"
    )
    member.leave()
