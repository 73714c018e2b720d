"""Who comes back while the others make a step that is longer than the join timeout leaves none of them out."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from everstep.quorum.gate import Gate, Rules
from everstep.quorum.membership import Membership
from everstep.quorum.request import NO_STATE
from quorum.test_gate import LIFE, SOON, a_request

TOKEN = bytes(32)
JOIN_S = 0.5


def test_one_of_those_that_make_the_step_lets_all_ask():
    gate = Gate(TOKEN, ("127.0.0.1", 0), Rules(1, JOIN_S, 2.0, groups=3), lambda count, last: None)
    members = [
        Membership(
            group=group,
            life=LIFE,
            token=TOKEN,
            find_lighthouse=lambda: f"http://{gate.address}",
            heartbeat_timeout_s=2.0,
        )
        for group in range(3)
    ]

    def asks(group, number, step):
        asked = replace(a_request(group, number), step=step)
        return [found.group for found in members[group].ask(asked, SOON)[1]]

    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(asks, group, 1, 0 if group < 2 else NO_STATE) for group in range(3)]
        assert [one.result() for one in first] == [[0, 1, 2]] * 3
        joiner = pool.submit(asks, 2, 2, NO_STATE)
        time.sleep(2 * JOIN_S)  # its time at the lighthouse would count, and leave out the one that asks last
        maker = pool.submit(asks, 0, 2, 1)
        time.sleep(JOIN_S / 3)
        assert asks(1, 2, 1) == joiner.result() == maker.result() == [0, 1, 2]
    for member in members:
        member.leave()
    gate.close()
