"""Members of one parity group are on different hosts and switches, where Slurm says what is on which."""

from collections import Counter

import pytest
import torch

from everstep.snapshot import stripes
from everstep.snapshot.agreement import Word
from everstep.snapshot.location import HOST_BITS, SWITCH_BITS, location_of
from snapshot_cluster import Cluster, assert_is_step


def slurm(*path: str) -> int:
    """The location of a task whose node has this address, from the uppermost switch down."""
    pattern = ".".join([*["switch"] * (len(path) - 1), "node"])
    return location_of({"SLURM_TOPOLOGY_ADDR": ".".join(path), "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}, "elsewhere")


def scattered(groups: int, racks: int, hosts: int) -> dict[int, tuple[str, str]]:
    """Rack and host of each group, handed out so that neighbouring numbers are as far from each other as can be: what
    dealing by numbers alone puts together."""
    return {group: (f"rack{group % racks}", f"node{group % (racks * hosts)}") for group in range(groups)}


@pytest.mark.parametrize(
    ("groups", "racks", "hosts"), [(64, 8, 4), (64, 8, 8), (1000, 125, 4), (96, 12, 8), (60, 4, 5)]
)
def test_a_rack_and_a_host_have_as_few_members_of_a_parity_group_as_can_be(groups, racks, hosts):
    where = scattered(groups, racks, hosts)
    locations = {group: slurm("top", rack, host) for group, (rack, host) in where.items()}
    dealt = {stripes.parity_group(range(groups), 8, group, locations) for group in range(groups)}
    assert sorted(member for mine in dealt for member in mine) == list(range(groups))
    for level in (0, 1):
        on = Counter(place[level] for place in where.values())
        for mine in dealt:
            found = Counter(where[member][level] for member in mine)
            assert all(count <= -(-on[place] // len(dealt)) for place, count in found.items())
    by_number = {stripes.parity_group(range(groups), 8, group) for group in range(groups)}
    assert max(max(Counter(where[m][0] for m in mine).values()) for mine in by_number) > 1


def test_every_member_finds_the_same_parity_groups():
    where = scattered(40, 5, 4)
    locations = {group: slurm(*place) for group, place in where.items() if group % 3}  # some have not spoken
    for group in range(40):
        mine = stripes.parity_group(range(40), 8, group, locations)
        assert list(mine) == sorted(mine)
        assert all(stripes.parity_group(range(40), 8, other, locations) == mine for other in mine)


def test_neighbours_sort_together_at_every_level():
    paths = [(f"pod{p}", f"leaf{p}{s}", f"node{p}{s}{h}") for p in range(4) for s in range(5) for h in range(6)]
    order = sorted(paths, key=lambda path: slurm("core", *path))
    for level in (0, 1):
        runs = [a[level] for a, b in zip(order, [*order[1:], ("", "", "")], strict=True) if a[level] != b[level]]
        assert len(runs) == len(set(runs)), "each switch's nodes lie end to end"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_TOPOLOGY_ADDR": "node7", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"},
        {"SLURM_TOPOLOGY_ADDR": "s1.node7.example.org", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"},
        {"SLURM_TOPOLOGY_ADDR": "s1.node7", "SLURM_TOPOLOGY_ADDR_PATTERN": ""},
    ],
)
def test_where_the_topology_is_not_known_the_host_is(environment):
    here, there = location_of(environment, "node7"), location_of(environment, "node8")
    assert 0 < here < 1 << 16
    if "switch" in environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "") or not environment:
        assert here != there
    assert slurm("s1", "node7") >> 16 != 0


def test_a_word_says_where_its_host_is_and_comes_through_a_sum_of_float64():
    for location in (0, slurm("s0", "s1", "node1"), (1 << HOST_BITS + 2 * SWITCH_BITS) - 1):
        word = Word(published=True, coded=True, busy_if_not=True, location=location)
        total = torch.zeros(3, dtype=torch.float64)
        total[1] = word.encode()
        total += torch.zeros(3, dtype=torch.float64)
        assert Word.decode(round(total.tolist()[1])) == word
    assert Word.decode(0) is None


def test_a_rack_that_is_lost_is_decoded():
    """Two racks of four hosts: numbers alone would put a rack's hosts into one parity group."""
    with Cluster(8, lambda group: slurm(f"rack{group % 2}", f"node{group}"), parity=2, parity_group=4) as run:
        run.take(1, 2, 3)
        for group in (0, 2, 4, 6):
            run.lose_host(group)
        again = run.recover(group=1)
        assert (again.decision.source, again.decision.step) == ("parity", 3)
        assert again.restored.decoded == (0, 2, 4, 6)
        assert_is_step(again.restored, 3)
