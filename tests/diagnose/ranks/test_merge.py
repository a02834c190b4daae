from memtriage.diagnose.ranks.merge import context, merge
from memtriage.model.findings import Finding, Projection
from memtriage.model.judged import DetectionLimit, Judged
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.store.reader import RunRecord
from memtriage.store.records import SCHEMA, HostSampleLine
from support.rank_records import rank_record

MiB = 1024**2
GiB = 1024**3


def leak(rank=None, **fields):
    return Finding(kind="leak", device="cuda:0", rank=rank, holder="losses[*]", **fields)


def merged(*ranks, **options):
    return merge(RunRecord(list(ranks)), **options)


def by_kind(report, kind):
    return [finding for finding in report.findings if finding.kind == kind]


class TestOneProcess:
    def test_its_record_is_the_report(self):
        record = rank_record(findings=[leak(bytes_per_step=MiB)], end="leak")
        record.ledgers = {
            "cuda:0": Ledger(device="cuda:0", total=1, source="s", rows=[LedgerRow(row="requested", bytes=1)])
        }
        report = merged(record)
        assert report.verdict == "leak"
        assert report.steps == 12
        assert report.findings == [leak(bytes_per_step=MiB)]
        assert report.marks == record.marks
        assert report.ledger == {"cuda:0": [LedgerRow(row="requested", bytes=1)]}
        assert (report.ranks.seen, report.ranks.of) == (1, 1)
        assert report.exception is None

    def test_exception_and_error(self):
        record = rank_record(end="error")
        record.end.exception = "ValueError: no"
        report = merged(record)
        assert (report.verdict, report.exception) == ("error", "ValueError: no")

    def test_findings_are_sorted_by_weight(self):
        record = rank_record(
            findings=[
                Finding(kind="pinned_rounding", device="host", bytes=9 * GiB),
                Finding(kind="residue", device="cuda:0", bytes=5),
                leak(bytes_per_step=1),
                leak(bytes_per_step=MiB),
            ]
        )
        assert [(finding.kind, finding.bytes_per_step) for finding in merged(record).findings] == [
            ("leak", MiB),
            ("leak", 1),
            ("residue", None),
            ("pinned_rounding", None),
        ]

    def test_what_ended_the_run_comes_first_and_suspicions_last(self):
        record = rank_record(
            findings=[
                leak(bytes_per_step=GiB, certainty="suspected"),
                leak(bytes_per_step=1, certainty="proven"),
                Finding(kind="malloc_retention", device="host", bytes=GiB),
                Finding(kind="out_of_memory", device="cuda:0", bytes=5),
            ],
            end="out_of_memory",
        )
        assert [(finding.kind, finding.certainty) for finding in merged(record).findings] == [
            ("out_of_memory", None),
            ("leak", "proven"),
            ("malloc_retention", None),
            ("leak", "suspected"),
        ]

    def test_a_ledger_says_its_step(self):
        record = rank_record()
        record.ledgers = {
            "cuda:0": Ledger(device="cuda:0", total=0, source="s", rows=[], step=7),
            "host": Ledger(device="host", total=0, source="s", rows=[]),  # as older records have it
        }
        assert merged(record).ledger_steps == {"cuda:0": 7}

    def test_out_of_memory_in_how_many_steps(self):
        record = rank_record(findings=[leak(bytes_per_step=GiB)], end="leak", allocated=[2 * GiB] * 5)
        record.end.device_limits = {"cuda:0": 10 * GiB}
        run = RunRecord([record])
        assert context(run, merge(run)).runs_out_in == [8]
        record.end.device_limits = {"cuda:0": 6 * GiB}
        assert context(run, merge(run)).runs_out_in == [4]
        record.end.passing = {"cuda:0": 3 * GiB}
        assert context(run, merge(run)).runs_out_in == [1]
        record.end.verdict = "out_of_memory"
        assert context(run, merge(run)).runs_out_in == [None]

    def test_the_headline_names_the_step_of_the_evidence(self):
        full = Projection(device="cpu", limit=10 * GiB, step=94)
        finding = Finding(kind="leak", device="cpu", bytes_per_step=MiB, projection=full)
        run = RunRecord([rank_record(findings=[finding], end="leak", host_limit=10 * GiB)])
        assert context(run, merge(run)).runs_out_in == [94 - 12]

    def test_a_host_leak_runs_into_the_host_limit(self):
        finding = Finding(kind="leak", device="cpu", bytes_per_step=GiB)
        run = RunRecord([rank_record(findings=[finding], end="leak", host_limit=4 * GiB)])
        assert context(run, merge(run)).runs_out_in == [3]


SHORT = Judged(scale="step", points=3, reason="3 steps are too few, 12 are needed")


def flat(limit):
    return Judged(scale="step", points=12, detection_limit=DetectionLimit(limit, "step"))


def judged_rank(rank, judged, *, world_size=3, end="clean", findings=()):
    record = rank_record(rank, world_size=world_size, end=end, findings=findings)
    record.end.judged = judged
    return record


class TestJudged:
    def test_a_job_is_clean_if_every_rank_is_by_the_weakest_limit(self):
        report = merged(*(judged_rank(rank, {"cpu": flat(512 << rank)}) for rank in range(3)))
        assert report.verdict == "clean"
        assert report.judged == {"cpu": flat(2048)}

    def test_one_rank_that_was_not_judged_forbids_clean_and_is_named(self):
        ranks = [judged_rank(rank, {"cpu": flat(512)}, end="clean") for rank in range(2)]
        report = merged(*ranks, judged_rank(2, {"cpu": SHORT}, end="not_judged"))
        assert report.verdict == "not_judged"
        assert report.judged["cpu"].reason == "rank 2: 3 steps are too few, 12 are needed"

    def test_a_reason_that_all_ranks_have_names_none(self):
        report = merged(*(judged_rank(rank, {"cpu": SHORT}, end="not_judged") for rank in range(3)))
        assert report.judged == {"cpu": SHORT}

    def test_a_rank_without_a_record_forbids_clean(self):
        ranks = [judged_rank(rank, {"cpu": flat(512)}) for rank in range(2)]
        report = merged(*ranks)
        assert report.verdict == "not_judged"
        run = RunRecord(ranks)
        assert context(run, report).missing == [2]

    def test_a_leak_on_one_rank_is_one_of_the_job(self):
        ranks = [judged_rank(0, {"cpu": SHORT}, world_size=2, end="not_judged")]
        ranks.append(judged_rank(1, {"cpu": Judged(scale="step", points=12)}, world_size=2, end="leak"))
        ranks[1].final_findings = [leak(bytes_per_step=MiB, certainty="proven")]
        assert merged(*ranks).verdict == "leak"

    def test_a_suspicion_is_open(self):
        findings = [leak(bytes_per_step=MiB, certainty="suspected")]
        record = judged_rank(None, {"cuda:0": flat(512)}, world_size=1, end="not_judged", findings=findings)
        assert merged(record).verdict == "not_judged"

    def test_where_the_watch_itself_failed_it_says_so(self):
        assert merged(judged_rank(None, {}, world_size=1, end="error")).verdict == "error"

    def test_record_without_judgments_keeps_its_verdict(self):
        assert merged(judged_rank(None, None, world_size=1)).verdict == "clean"
        assert merged(judged_rank(None, {}, world_size=1)).verdict == "not_judged"

    def test_growing_findings_are_sorted_by_rate(self):
        cycle = Finding(kind="garbage_cycle", device="cpu", bytes_per_step=GiB)
        slow = leak(bytes_per_second=5)
        record = rank_record(findings=[slow, leak(bytes_per_step=MiB), cycle])
        assert [next(iter(finding.rates.values())) for finding in merged(record).findings] == [GiB, MiB, 5]


class TestKilled:
    def test_no_end_and_gone_is_killed_whatever_was_known_so_far(self):
        report = merged(rank_record(end=None, alive=False, findings=[leak()]))
        assert report.verdict == "killed"
        assert report.findings == [leak()]
        assert report.steps == 12

    def test_a_process_that_still_runs_is_judged_by_what_is_known(self):
        assert merged(rank_record(end=None, alive=True, findings=[leak()])).verdict == "leak"
        assert merged(rank_record(end=None, alive=True)).verdict == "not_judged"

    def test_what_other_ranks_say_counts_unless_it_is_clean(self):
        killed = rank_record(1, world_size=2, end=None, alive=False)
        assert merged(rank_record(0, world_size=2), killed).verdict == "killed"
        assert merged(rank_record(0, world_size=2, end="error"), killed).verdict == "killed"
        assert merged(rank_record(0, world_size=2, end="leak", findings=[leak()]), killed).verdict == "leak"
        assert merged(rank_record(0, world_size=2, end="out_of_memory"), killed).verdict == "out_of_memory"

    def test_never_the_verdict_while_the_run_lives(self):
        gone = rank_record(1, world_size=2, end=None, alive=False)
        assert merged(rank_record(0, world_size=2), gone, live=True).verdict == "not_judged"

    def test_sigkill_alone_is_not_called_out_of_memory(self):
        sample = HostSampleLine(rss=GiB, cgroup_usage=2 * GiB, cgroup_limit=64 * GiB, oom_kill=0)
        run = RunRecord([rank_record(end=None, alive=False, host=[sample])])
        report = merge(run)
        assert report.verdict == "killed"
        assert report.findings == []
        (note,) = context(run, report).notes
        assert "last seen at step 12" in note
        assert "1.0 GiB resident" in note
        assert "2.0 GiB of 64.0 GiB" in note
        assert "what killed it is not in the record" in note

    def test_of_many_killed_ranks_a_few_are_told_in_full(self):
        run = RunRecord([rank_record(rank, world_size=9, end=None, alive=False) for rank in range(9)])
        *told, rest = context(run, merge(run)).notes
        assert [note.partition(" was killed")[0] for note in told] == ["rank 0", "rank 1", "rank 2"]
        assert rest == "6 more ranks were killed"

    def test_a_full_host_comes_first(self):
        record = rank_record(end=None, alive=False, host=[HostSampleLine(available=GiB)], host_limit=64 * GiB)
        record.interim_findings = [leak(bytes_per_step=MiB)]
        assert [finding.kind for finding in merged(record).findings] == ["host_limit", "leak"]

    def test_a_full_host_is_no_finding_for_a_rank_that_ended(self):
        sample = HostSampleLine(cgroup_usage=64 * GiB, cgroup_limit=64 * GiB)
        assert merged(rank_record(host=[sample])).findings == []


class TestRanks:
    def test_findings_carry_their_rank_and_the_leaking_one_is_named(self):
        report = merged(
            rank_record(0, world_size=2),
            rank_record(1, world_size=2, findings=[leak()], end="leak"),
        )
        assert report.verdict == "leak"
        assert [finding.rank for finding in by_kind(report, "leak")] == [1]

    def test_seen_of_and_missing(self):
        run = RunRecord([rank_record(0, world_size=4), rank_record(2, world_size=4)])
        report = merge(run)
        assert (report.ranks.seen, report.ranks.of) == (2, 4)
        assert context(run, report).missing == [1, 3]

    def test_the_ledger_is_that_of_the_first_rank_that_has_one(self):
        first, second = rank_record(0, world_size=2), rank_record(1, world_size=2)
        second.ledgers = {"host": Ledger(device="host", total=0, source="s", rows=[])}
        run = RunRecord([first, second])
        report = merge(run)
        assert report.ledger == {"host": []}
        assert context(run, report).ledger_rank == 1

    def test_the_exception_is_that_of_the_rank_that_died_of_memory(self):
        follower, cause = rank_record(0, world_size=2), rank_record(1, world_size=2, end="out_of_memory")
        follower.end.exception = "RuntimeError: connection closed by peer"
        cause.end.exception = "torch.OutOfMemoryError: CUDA out of memory"
        report = merged(follower, cause)
        assert report.verdict == "out_of_memory"
        assert report.exception == "torch.OutOfMemoryError: CUDA out of memory"

    def test_notes_of_ranks_are_told_once(self):
        ranks = [rank_record(rank, world_size=3) for rank in range(3)]
        for rank in ranks:
            rank.notes = ["the collector is off"]
        ranks[1].cut_lines = 2
        run = RunRecord(ranks, notes=["a file was ignored"])
        assert context(run, merge(run)).notes == [
            "a file was ignored",
            "2 cut or garbled lines left out, in 1 of 3 records",
            "the collector is off (3 of 3 ranks)",
        ]

    def test_a_rank_that_has_not_finished_is_told(self):
        run = RunRecord([rank_record(0, world_size=2), rank_record(1, world_size=2, end=None, alive=True)])
        assert context(run, merge(run)).notes == ["rank 1 had not finished: figures so far"]

    def test_a_newer_record_format_is_told(self):
        run = RunRecord([rank_record(schema=SCHEMA + 1)])
        assert "newer memtriage" in context(run, merge(run)).notes[0]


def test_a_run_is_over_unless_it_is_said_to_go_on():
    run = RunRecord([rank_record(0, world_size=2), rank_record(1, world_size=2, end=None, alive=None)])
    said = context(run, merge(run))
    assert (said.killed, said.running) == ([1], [])
    live = context(run, merge(run, live=True), live=True)
    assert (live.killed, live.running) == ([], [1])
