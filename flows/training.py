"""Stage 2 as a flow: targets -> drafters."""

from prefect import flow

from bdcore.study import study_for
from tasks.progress import ArtifactRef
from tasks.recording import live_recorder, record_drafter
from tasks.targets import generate_targets, prepare_verifier
from tasks.tracking import connect
from tasks.training import make_base, train_drafter


@flow(name="training", flow_run_name="training {config}")
def training(
    config: str = "configs/quick.yaml",
    overrides: list[str] = [],  # noqa: B006 - as in flows.targets
    limit: int | None = None,
    mlflow_parent: str | None = None,
) -> ArtifactRef:
    """The base drafter, then the BudgetDraft drafter. Makes targets that are missing."""
    with study_for(config, overrides, limit) as study:
        tracker = connect(study, parent=mlflow_parent)
        verifier = prepare_verifier(study)
        made = generate_targets(study, verifier)
        with tracker.run("base-drafter", "base drafter", study.keys.base, parent=mlflow_parent) as run:
            base = make_base(study, verifier, made, live_recorder(run))
            record_drafter(run, study, base)
        with tracker.run("drafter", "budgetdraft drafter", study.keys.trained, parent=mlflow_parent) as run:
            trained = train_drafter(study, verifier, base, made, live_recorder(run))
            record_drafter(run, study, trained)
        return trained


if __name__ == "__main__":
    training()
