from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.store.layout import RankIdentity, identify, record_path

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "TORCHELASTIC_RUN_ID": "job-7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def identity(env):
    return identify(env, pid=4711, time_s=1_700_000_000.0)


SLURM = {
    "SLURM_JOB_ID": "99",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "5",
    "SLURM_RESTART_COUNT": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "PMIX_NAMESPACE": "prterun-node0-77@1",
}
DEEPSPEED = {key: value for key, value in TORCHRUN.items() if not key.startswith("TORCHELASTIC")}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, RankIdentity("20231114T221320Z-4711", 0, None, 1, None)),
        (TORCHRUN, RankIdentity("job-7", 2, 3, 8, 1)),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, RankIdentity("node0-29500", 2, 3, 8, 1)),
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, RankIdentity("job-7", 2, 0, 1, 1)),
        (DEEPSPEED, RankIdentity("node0-29500", 0, 3, 8, 1)),
        (SLURM, RankIdentity("slurm-99.1", 1, 5, 16, 5)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "8"}, RankIdentity("slurm-99.1", 1, 5, 8, 5)),
        (SLURM | TORCHRUN, RankIdentity("job-7", 2, 3, 8, 1)),  # the launcher inside decides
        (OPEN_MPI, RankIdentity("mpi-prterun-node0-77_1", 0, 2, 4, 0)),
    ],
)
def test_a_launcher_names_run_restart_and_rank(env, expected):
    assert identity(env) == expected


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_half_a_rendezvous_names_no_run(missing):
    env = {key: value for key, value in TORCHRUN.items() if key not in (missing, "TORCHELASTIC_RUN_ID")}
    neither = {key: value for key, value in env.items() if not key.startswith("MASTER")}
    assert identity(env).run_id == identity(neither).run_id != ""


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "3"},
        {"WORLD_SIZE": "8"},
        {"RANK": "8", "WORLD_SIZE": "8"},
        {"RANK": "-1", "WORLD_SIZE": "8"},
        {"RANK": "three", "WORLD_SIZE": "8"},
        {"RANK": "", "WORLD_SIZE": "8"},
        {"RANK": "²", "WORLD_SIZE": "8"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"},
        {"SLURM_JOB_ID": "99", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"},  # a batch script's shell
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_what_is_no_rank(env):
    assert identity(env).rank is None
    assert identity(env).world_size == 1


def test_other_tasks_of_slurm_are_ranks_though_no_step_is_named():
    env = {"SLURM_JOB_ID": "99", "SLURM_PROCID": "1", "SLURM_NTASKS": "16"}
    assert identity(env).rank == 1
    assert identity(env | {"SLURM_PROCID": "0", "SLURM_STEPID": "0"}).rank == 0


def test_record_path():
    assert record_path(Path("out"), identity(TORCHRUN)) == Path("out/job-7/2/rank-00003.jsonl")
    assert record_path(Path("out"), identity({})).name == "rank-00000.jsonl"


@given(st.text(min_size=1))
def test_a_run_id_never_leaves_its_directory(run_id):
    path = record_path(Path("out"), identity(TORCHRUN | {"TORCHELASTIC_RUN_ID": run_id}))
    assert len(path.parts) == 4
    assert not path.parts[1].startswith(".")
    assert len(path.parts[1].encode()) <= 200
