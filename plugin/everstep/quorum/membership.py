"""A group's place in torchft's quorums.

Rank 0 of a group runs torchft's manager server, which speaks for the group: it sends heartbeats to the lighthouse,
joins quorums when all ranks of the group have asked, and collects the group's vote. Every rank has a client of it.
"""

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torchft.coordination import ManagerClient, ManagerServer

from everstep.quorum.identity import StrangerError, bind_address, group_of, replica_id

HEARTBEAT = timedelta(milliseconds=100)
STRANGER_PAUSE_S = 0.5
"""A quorum with a stranger in it comes at once, again and again."""


class QuorumUnavailable(RuntimeError):
    """No quorum now: too few groups, or no lighthouse. Asking again later may succeed."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """A quorum as one rank of one group sees it.

    Attributes:
        id: torchft's quorum id; may start again from 1 when the lighthouse does.
        key: differs from every other quorum's in which a process group has to be built; the same on all members.
        rank: place of this group among the members.
        groups: group ids of all members, in rank order.
        step: the newest step that a member has committed; -1 if none has anything.
        leads: whether this group comes first among the members at `step`.
        heals: whether this group is behind and must take its state from `source`.
        source: place of the member to heal from, or None.
        source_manager: address of that member's manager server.
        serves: whether another member heals from this group.
        store: `host:port` of a TCPStore that all members reach.
    """

    id: int
    key: str
    rank: int
    groups: tuple[int, ...]
    step: int
    leads: bool
    heals: bool
    source: int | None
    source_manager: str
    serves: bool
    store: str


class Membership:
    """Joins quorums and votes for one rank of a group.

    Args:
        group: group id.
        rank, world_size: of this process in the group.
        store: the group's own store, which outlives its workers' restarts or not.
        incarnation: differs after every restart of the group's workers.
        store_address: `host:port` of a TCPStore of this group that other groups reach.
        find_lighthouse: gives `http://host:port`, and another one when the lighthouse has moved.
        host: name or address the manager server is reached under, the only one it listens on.
        token: of the run; tells its replicas from others.
        connect_timeout: for connections to manager servers and the lighthouse.
    """

    def __init__(
        self,
        *,
        group: int,
        rank: int,
        world_size: int,
        store: dist.Store,
        incarnation: str,
        store_address: str,
        find_lighthouse: Callable[[], str],
        host: str,
        token: bytes,
        connect_timeout: timedelta,
    ) -> None:
        self.rank = rank
        self._token = token
        self._group, self._world_size, self._host = group, world_size, host
        self._store = dist.PrefixStore(f"everstep/membership/{incarnation}", store)
        self._store_address = store_address
        self._find_lighthouse = find_lighthouse
        self._connect_timeout = connect_timeout
        self._server: ManagerServer | None = None
        self._lighthouse = ""
        self._moves = 0
        self._connect()

    def _connect(self) -> None:
        """Speak for the group to the lighthouse where it is now. All ranks of the group call this."""
        self._lighthouse = self._find_lighthouse()
        key = f"manager-{self._moves}"
        if self.rank == 0:
            self._server = ManagerServer(
                replica_id=replica_id(self._token, self._group),
                lighthouse_addr=self._lighthouse,
                hostname=self._host,
                bind=bind_address(self._host),
                store_addr=self._store_address,
                world_size=self._world_size,
                heartbeat_interval=HEARTBEAT,
                connect_timeout=self._connect_timeout,
                # A lighthouse that restarts is asked again every 100 ms until the quorum's own timeout.
                quorum_retries=10_000,
            )
            self._store.set(key, self._server.address())
        self._client = ManagerClient(self._store.get(key).decode(), connect_timeout=self._connect_timeout)

    def follow_lighthouse(self, all_in_group: Callable[[bool], bool]) -> bool:
        """After a quorum that did not come: if the lighthouse is elsewhere now, speak to it there. Returns whether it
        moved. All ranks of the group call this; `all_in_group` tells each whether a flag holds on all."""
        if all_in_group(self._find_lighthouse() == self._lighthouse):
            return False
        self.leave()
        self._moves += 1
        self._connect()
        return True

    def join(self, *, step: int, failures: int, metadata: str, timeout: timedelta) -> Quorum:
        """Wait for the next quorum. All ranks of the group call this.

        Args:
            step: last step this group committed, -1 for none.
            failures: attempts at the next step that failed since the last quorum that worked; above 0 the members
                build a new process group.
            metadata: what a member that heals from this rank is told: the address of the heal source.
            timeout: for the whole wait.

        Raises:
            QuorumUnavailable: none came in time.
        """
        try:
            answer = self._client._quorum(
                group_rank=self.rank,
                step=step,
                checkpoint_metadata=metadata,
                shrink_only=False,
                timeout=timeout,
                # Replicas begin equal by seed; the audit checks it.
                init_sync=False,
                commit_failures=failures,
            )
        except Exception as error:  # the Rust client raises several unrelated types
            raise QuorumUnavailable(str(error).splitlines()[0][:300]) from error
        try:
            groups = tuple(group_of(self._token, name) for name in answer.replica_ids)
        except StrangerError as error:
            time.sleep(STRANGER_PAUSE_S)
            raise QuorumUnavailable(str(error)) from error
        members = ",".join(answer.replica_ids)
        # The id alone may repeat after a lighthouse restart, and old keys stay in the members' stores.
        key = f"{answer.quorum_id}/{answer.max_step}/{uuid.uuid5(uuid.NAMESPACE_OID, members)}"
        return Quorum(
            id=answer.quorum_id,
            key=key,
            rank=answer.replica_rank,
            groups=groups,
            step=answer.max_step,
            leads=answer.max_replica_rank == 0,
            heals=answer.heal,
            source=answer.recover_src_replica_rank,
            source_manager=answer.recover_src_manager_address,
            serves=bool(answer.recover_dst_replica_ranks),
            store=answer.store_address,
        )

    def members_key(self, quorum: Quorum) -> str:
        """The part of `quorum.key` that stays while the same process group serves."""
        return f"{quorum.id}/{quorum.key.rpartition('/')[2]}"

    def heal_address(self, quorum: Quorum, timeout: timedelta) -> str:
        """Where this rank finds the state it heals from. Raises QuorumUnavailable if the source cannot be asked."""
        try:
            client = ManagerClient(quorum.source_manager, connect_timeout=self._connect_timeout)
            return client._checkpoint_metadata(self.rank, timeout=timeout)
        except Exception as error:
            raise QuorumUnavailable(f"the heal source did not answer: {error}".splitlines()[0]) from error

    def vote(self, *, step: int, yes: bool, timeout: timedelta) -> bool:
        """Whether all ranks of this group vote yes. All ranks call this. Raises QuorumUnavailable."""
        try:
            return self._client.should_commit(self.rank, step, yes, timeout=timeout)
        except Exception as error:
            raise QuorumUnavailable(f"the group's vote failed: {error}".splitlines()[0]) from error

    def leave(self) -> None:
        """Stop the heartbeats; the other groups go on without this one."""
        if self._server is not None:
            self._server.shutdown()


def incarnation() -> str:
    """Tells this start of the group's workers from earlier ones that used the same store."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
