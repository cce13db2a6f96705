"""What a decision of the router costs."""

from load_tests.router_cost import CASES, decisions, main


def test_every_decision_is_timed():
    requests, reports = decisions(num_replicas=2, num_waiting=3, count=10)
    assert len(requests) == len(reports) == 10
    assert min(requests + reports) >= 0


def test_the_table_has_a_line_for_each_case(capsys):
    assert main(["--count", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(CASES)
