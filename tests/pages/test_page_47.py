"""Page 47: under a scheduler. What needs a cluster is in tests/processes/test_slurm.py."""

import re

import pytest
import yaml

from accel_demo.lab import cables
from tests.pages.pages import TUTORIALS, load_module, rows_below, transcript

PAGE = TUTORIALS / "47_under_a_scheduler.md"
missing = cables.why_not()


@pytest.mark.parametrize("name", ["launches", "preempt", "slurm_tasks"])
def test_each_transcript_matches_its_command_and_is_on_the_page(name):
    recorded = transcript(name)
    assert list(recorded) == load_module(TUTORIALS / "40_record.py").RECORDS[name]
    [output] = recorded.values()
    assert set(output.splitlines()) <= set(PAGE.read_text().splitlines())


def test_of_the_four_lines_in_the_question_only_srun_torchrun_starts_one_group():
    rows = {row[0]: row[2] for row in rows_below(PAGE, "last line of the script")}
    assert rows["`torchrun --nnodes 2 …`"] == "none"
    assert rows["`srun torchrun --nnodes 2 …`"] == "1 group of 4"
    assert rows["`srun torchrun --standalone …`"] == "2 groups of 2"
    assert rows["`srun python …`"] == "4 groups of 1"


def test_each_stopped_job_resumed_at_its_step_and_ended_with_the_same_bits():
    rows = rows_below(PAGE, "reason")
    assert [reason for reason, *_ in rows] == ["preemption", "time limit"]
    for _, stopped, resumed, queued, processes, weights in rows:
        assert stopped == resumed and weights == "equal"
        assert float(queued.split()[0]) > 100 and processes == "4, then 4"


@pytest.mark.pages
@pytest.mark.skipif(missing is not None, reason=str(missing))
def test_a_task_per_process_connects_with_the_variables_that_accel_demo_sets(start):
    command = "accel-demo nodes --slurm-variables -- python tutorials/47_tasks.py"
    ended = start(command.split())
    assert ended.returncode == 0, ended.stderr
    [recorded] = transcript("slurm_tasks").values()
    assert sorted(ended.stdout.splitlines()) == sorted(recorded.splitlines())
    assert len(re.findall(r"rank [0-3] of 4 on \S+, sum 6", ended.stdout)) == 4


@pytest.mark.frameworks
def test_the_manifest_has_the_published_schema_and_no_other_names():
    """The schema's classes ignore names that they don't have, so what they keep is compared."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    manifest = yaml.safe_load((TUTORIALS / "cluster/train_job.yaml").read_text("utf-8"))
    kept = TrainerV1alpha1TrainJob.from_dict(manifest).to_dict()
    assert kept == manifest
    assert TrainerV1alpha1TrainJob.from_dict(manifest | {"nodes": 2}).to_dict() == manifest
