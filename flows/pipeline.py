"""The main job: targets -> training -> evaluation -> reporting, under one MLflow run."""

from prefect import flow
from prefect.states import raise_state_exception

from bdcore.study import study_for
from flows.evaluation import evaluation
from flows.reporting import reporting
from flows.targets import targets
from flows.training import training
from tasks.progress import ArtifactRef
from tasks.recording import record_pipeline, record_report
from tasks.tracking import connect


@flow(name="pipeline", flow_run_name="pipeline {config}")
def pipeline(
    config: str = "configs/quick.yaml",
    overrides: list[str] = [],  # noqa: B006 - as in flows.targets
    limit: int | None = None,
) -> ArtifactRef:
    """All four stages. The report is made even when cells of the grid failed; the flow then fails."""
    with study_for(config, overrides, limit) as study:
        tracker = connect(study)
        with tracker.run("pipeline", study.config.name, study.key) as run:
            record_pipeline(run, study)
            stage = {"overrides": overrides, "limit": limit, "mlflow_parent": run.run_id}
            targets(config, **stage)
            training(config, **stage)
            measured = evaluation(config, **stage, return_state=True)
            report = reporting(config, overrides, limit)
            record_report(run, report)
            if not measured.is_completed():
                raise_state_exception(measured)
        return report


if __name__ == "__main__":
    pipeline()
