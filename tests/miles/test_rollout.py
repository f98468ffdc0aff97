"""A whole rollout: Miles' data source, its rollout function, and the group filter named by its option."""

from miles.utils.types import Sample

from .engine import ask
from .tokens import trained_runs
from .trainer import running_trainer, write_prompt_data


async def test_a_group_without_a_verdict_is_dropped_and_the_next_prompt_taken(checkpoint, tasks, task, tmp_path):
    policies = ["solve", "fail-late", "wrong"]
    prompt_data = write_prompt_data(tmp_path / "tasks.jsonl", [ask(task, policy, policy) for policy in policies])
    with running_trainer(
        checkpoint,
        tasks,
        prompt_data=str(prompt_data),
        rollout_batch_size=2,
        over_sampling_batch_size=1,
        n_samples_per_prompt=2,
    ) as trainer:
        output = await trainer.run_rollout()
    assert output.metrics == {"rollout/dynamic_filter/drop_group_has_aborted": 1}
    assert [[sample.reward for sample in group] for group in output.samples] == [[1.0, 1.0], [0.0, 0.0]]
    for sample in (sample for group in output.samples for sample in group):
        assert sample.status == Sample.Status.COMPLETED
        assert len(trained_runs(sample)) == 5
    accepted = {policy: len(trainer.engine.accepted(policy)) for policy in policies}
    assert accepted == {"solve": 10, "fail-late": 4, "wrong": 10}
