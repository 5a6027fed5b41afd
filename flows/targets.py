"""Stage 1 as a flow: documents -> targets."""

from prefect import flow

from bdcore.study import study_for
from tasks.progress import ArtifactRef
from tasks.recording import record_targets
from tasks.targets import generate_targets, prepare_verifier
from tasks.tracking import connect


@flow(name="targets", flow_run_name="targets {config}")
def targets(
    config: str = "configs/quick.yaml",
    overrides: list[str] = [],  # noqa: B006 - Prefect reads defaults into the deployment's schema and never mutates them
    limit: int | None = None,
    mlflow_parent: str | None = None,
) -> ArtifactRef:
    """The verifier's greedy tokens as Parquet. Reuses what is done."""
    with study_for(config, overrides, limit) as study:
        tracker = connect(study, parent=mlflow_parent)
        with tracker.run("targets", "targets", study.keys.targets, parent=mlflow_parent) as run:
            made = generate_targets(study, prepare_verifier(study))
            record_targets(run, study, made)
        return made


if __name__ == "__main__":
    targets()
