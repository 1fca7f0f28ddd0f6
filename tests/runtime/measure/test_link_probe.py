"""Links on made-up clocks: what each rank notes, what becomes of it; and once between two real processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flexspec.graph import Node
from flexspec.runtime.measure import link_probe
from flexspec.runtime.measure.link_probe import SIZES, LinkProbe, probe_links, reduce_us, transfer_us


class Host:
    """A host whose clock only moves in exchanges and in the work between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        self.exchanges: list[tuple[int, str]] = []
        monkeypatch.setattr(link_probe, "_work", self._work)

    def _work(self) -> None:
        self.now_ns += 1_000_000

    def meet(self, rank: int, node: Node, data: NDArray[np.float32] | None) -> NDArray[np.float32]:
        assert (data is None) == (node.op == "recv")
        self.exchanges.append((rank, node.op))
        self.now_ns += 25_000 if node.op != "reduce" else 4_000 + 1_000 * (len(self.exchanges) % 2)
        return np.ones((1, 1), np.float32)

    def probe(self, rank: int, ranks: int = 2) -> LinkProbe:
        return LinkProbe(rank, tuple(range(ranks)), self.meet, clock_ns=lambda: self.now_ns)


def test_ranks_take_turns_to_give_after_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    moments = host.probe(0).transfer(3)
    assert [op for _, op in host.exchanges[:4]] == ["send", "recv", "send", "recv"]
    gives, takes = np.array(moments[::2]), np.array(moments[1::2])
    assert len(moments) == 2 * len(gives) == 40
    stretch = link_probe._STAGE_READS * 1_000_000  # of work before a rank gives, in which no time is noted
    assert set((takes - gives).tolist()) == {25_000 + 25_000}  # its own send, then the other's
    assert set((gives[1:] - takes[:-1]).tolist()) == {stretch}
    host = Host(monkeypatch)
    assert host.probe(2, 3).transfer(3) == [] and host.exchanges == [], "a third rank has no part in it"


def test_a_sum_takes_what_the_exchange_takes_and_not_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    spent = host.probe(1).reduce(3)
    assert sorted(set(spent)) == [4.0, 5.0] and len(spent) == 7 * 12
    assert {op for _, op in host.exchanges} == {"reduce"}


def test_a_transfer_is_from_giver_to_taker_in_either_direction() -> None:
    began = np.arange(40) * 1_000_000
    took_ns = np.where(np.arange(40) < 30, 12_000, 90_000)  # a quarter of them held up
    first = np.where(np.arange(40) % 2 == 0, began, began + took_ns)
    second = np.where(np.arange(40) % 2 == 0, began + took_ns, began)
    assert transfer_us([first.tolist(), second.tolist()]) == 12.0


def test_a_sum_is_the_mean_of_a_chain_over_ranks() -> None:
    chains = np.repeat([40.0, 20, 20, 20, 40, 80, 80], 12)
    chains[12] += 24  # one late sum counts in its chain: 22 instead of 20
    assert reduce_us([chains.tolist(), (chains + 2).tolist()]) == 22.0  # lower quartile of 21, 21, 23, 41, 41, 81, 81


@pytest.mark.ranks
def test_links_between_two_processes_are_measured() -> None:
    pytest.importorskip("torch")
    transfers, reduces = probe_links(2)
    assert set(transfers) == set(reduces) == set(SIZES)
    for times in (transfers, reduces):
        assert 0 < times[SIZES[0]] < times[SIZES[-1]], "4 MiB take longer than 1 KiB"


@pytest.mark.ranks
def test_ranks_that_fail_are_a_toolchain_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexspec.errors import ToolchainError
    from flexspec.runtime.distributed import processes

    def environments(ranks: int) -> list[dict[str, str]]:
        return [each | {"WORLD_SIZE": "none"} for each in before(ranks)]

    before: Any = processes.rank_environments
    monkeypatch.setattr(processes, "rank_environments", environments)
    with pytest.raises(ToolchainError, match="links could not be measured: .*WORLD_SIZE='none'.*--no-links"):
        probe_links(1)
