from __future__ import annotations

from npugrad_server.pool.alarms import Alarms


def test_alarms_come_in_order_and_those_of_ended_calls_not_at_all() -> None:
    live = {1, 2, 3}
    alarms = Alarms(live.__contains__)
    for when, call in ((3.0, 1), (1.0, 2), (2.0, 3)):
        alarms.set(when, call, 3)
    assert alarms.next() == 1.0
    live.discard(2)
    assert alarms.next() == 2.0
    assert list(alarms.due(2.5)) == [3]
    assert alarms.next() == 3.0
    assert list(alarms.due(9.0)) == [1]
    assert alarms.next() is None


def test_an_alarm_set_while_others_are_due_is_not_lost() -> None:
    alarms = Alarms(lambda _: True)
    alarms.set(1.0, 1, 1)
    seen = []
    for call in alarms.due(2.0):
        seen.append(call)
        if call == 1:
            alarms.set(2.0, 2, 1)
            alarms.set(3.0, 3, 1)
    assert seen == [1, 2]
    assert alarms.next() == 3.0
