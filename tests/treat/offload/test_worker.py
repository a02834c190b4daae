"""The optimizer's thread: what is given back waits for the job that is under way."""

from __future__ import annotations

import threading

from memtriage.treat.offload.pipeline import Worker


def test_closed_at_rest_it_gives_back_at_once() -> None:
    worker = Worker()
    worker.run([], lambda: None)
    given_back: list[str] = []
    worker.close(lambda: given_back.append("all"))
    assert given_back == ["all"]


def test_close_waits_for_the_running_job_and_drops_the_rest() -> None:
    worker, begun, may_end, given_back = Worker(), threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def job() -> None:
        begun.set()
        may_end.wait()
        order.append("job")

    def give_back() -> None:
        order.append("given back")
        given_back.set()

    worker.submit([], job)
    dropped = worker.submit([], lambda: order.append("dropped"))
    begun.wait()
    worker.close(give_back)
    assert not given_back.is_set()
    may_end.set()
    assert given_back.wait(60)
    assert order == ["job", "given back"]
    assert dropped.cancelled()
