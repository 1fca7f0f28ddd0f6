"""Who is admitted next: requests of one group take turns with those of others, and nobody waits for ever."""

from __future__ import annotations

import pytest

from flexspec.draft_plan import WorstCase
from flexspec.runtime.engine.scheduler import EngineLimits, Scheduler
from flexspec.sampling import SamplingParams


class NoText:
    def push(self, tokens: list[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


@pytest.fixture
def scheduler() -> Scheduler:
    """One request at a time."""
    return Scheduler(1000, EngineLimits(64, max_running=1), WorstCase(0, 0, 0), NoText, ())


def submit(scheduler: Scheduler, group: object, count: int = 1) -> list[int]:
    params = SamplingParams(max_tokens=1)
    return [scheduler.submit([1], params, lambda delta: None, 10, group) for _ in range(count)]


def served(scheduler: Scheduler, count: int) -> list[int]:
    """Ids of the next requests, each admitted when the one before it has ended."""
    ids = []
    for _ in range(count):
        (running,) = scheduler.admit()
        ids.append(running.sequence.request_id)
        scheduler.release(running)
    return ids


def test_without_groups_first_come_is_first_served(scheduler: Scheduler) -> None:
    first = submit(scheduler, None, 3)
    assert served(scheduler, 1) == first[:1]
    later = submit(scheduler, None, 2)
    assert served(scheduler, 4) == first[1:] + later


def test_a_group_of_many_does_not_hold_others_up(scheduler: Scheduler) -> None:
    big, other = submit(scheduler, "big", 100), submit(scheduler, "other", 3)
    alone = submit(scheduler, None)
    assert served(scheduler, 6) == [big[0], other[0], alone[0], big[1], other[1], big[2]]


def test_one_who_comes_in_the_middle_waits_for_one_turn(scheduler: Scheduler) -> None:
    big = submit(scheduler, "big", 100)
    assert served(scheduler, 40) == big[:40]
    late = submit(scheduler, None)
    assert served(scheduler, 2) == [big[40], late[0]]


def test_a_group_goes_on_while_others_keep_coming(scheduler: Scheduler) -> None:
    """Each turn of the others brings the group's own nearer: ten requests are served within ten turns."""
    big, order = submit(scheduler, "big", 10), []
    for _ in range(10):
        submit(scheduler, None)
        order += served(scheduler, 2)
    assert [request for request in order if request in big] == big
