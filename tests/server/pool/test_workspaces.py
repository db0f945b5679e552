from __future__ import annotations

from npugrad_server.pool.workspaces import LearnedWorkspaces


def test_the_newest_figure_of_a_kind_counts_and_the_unknown_is_nothing() -> None:
    learned = LearnedWorkspaces()
    assert learned.expect("a") == 0
    learned.learn("a", 100)
    learned.learn("a", 40)
    assert (learned.expect("a"), learned.expect("b"), len(learned)) == (40, 0, 1)


def test_kinds_not_met_for_longest_are_forgotten() -> None:
    learned = LearnedWorkspaces(capacity=3)
    for number in range(3):
        learned.learn(number, 10 + number)
    assert learned.expect(0) == 10
    learned.learn(3, 13)
    assert [learned.expect(number) for number in range(4)] == [10, 0, 12, 13]
    assert len(learned) == 3
