"""The audit of trained and dropped episodes."""

import math

from arealite.core.ledger.audit import Audit


def test_long_answers_that_go_stale_raise_the_alarm_once():
    audit = Audit()
    for _ in range(90):
        audit.add("trained", tokens=100, reward=0.5)
    assert audit.alarm() is None
    for _ in range(10):
        audit.add("stale", tokens=900, reward=0.1)
    message = audit.alarm()
    assert message is not None and "long answers are starved" in message and "900" in message
    assert audit.alarm() is None
    for _ in range(30000):
        audit.add("trained", tokens=100, reward=0.5)
    assert audit.alarm() is None and not audit.has_alarmed


def test_filtered_episodes_are_no_loss():
    audit = Audit()
    for _ in range(100):
        audit.add("rejected")
        audit.add("trained", tokens=10, reward=1.0)
    assert audit.alarm() is None
    stats = audit.stats()
    assert abs(stats["audit/rejected_share"] - 0.5) < 0.01
    assert math.isclose(stats["audit/length_trained"], 10)
