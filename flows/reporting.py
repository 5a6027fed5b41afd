"""Stage 4 as a flow: rows -> collapse report."""

from prefect import flow

from bdcore.study import study_for
from tasks.progress import ArtifactRef
from tasks.reporting import report_grid


@flow(name="reporting", flow_run_name="reporting {config}")
def reporting(
    config: str = "configs/quick.yaml",
    overrides: list[str] = [],  # noqa: B006 - as in flows.targets
    limit: int | None = None,
) -> ArtifactRef:
    """The report of what has been measured so far, whole or in part."""
    with study_for(config, overrides, limit) as study:
        return report_grid(study)


if __name__ == "__main__":
    reporting()
