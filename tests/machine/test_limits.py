from memtriage.machine.limits import POLICY, resource_limits, shared_memory

GiB = 1024**3


def by_name(facts):
    return {fact.name: fact for fact in facts}


def test_shared_memory():
    small, large = shared_memory(64 * 1024**2, 0), shared_memory(16 * GiB, GiB)
    assert small.status == "bad" and "--shm-size" in small.advice
    assert large.value == "16.0 GiB, 1.0 GiB in use" and large.advice is None
    assert shared_memory(None, None).value == "none"


def test_resource_limits():
    unlimited = by_name(resource_limits(None, None))
    assert {fact.value for fact in unlimited.values()} == {"no limit"}
    limited = by_name(resource_limits(8 * GiB, 64 * 1024))
    assert (limited["RLIMIT_AS"].status, limited["RLIMIT_MEMLOCK"].status) == ("bad", "note")


def test_a_limit_at_the_policy_is_enough():
    assert shared_memory(POLICY.shared_memory, 0).status == "ok"
    assert by_name(resource_limits(None, POLICY.locked))["RLIMIT_MEMLOCK"].status == "ok"
    assert by_name(resource_limits(None, POLICY.locked - 1))["RLIMIT_MEMLOCK"].status == "note"
