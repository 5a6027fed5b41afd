"""Stage 3 as a flow: drafters -> sample and round rows over the grid."""

from prefect import flow

from bdcore.evaluation.grid import REPLAY, writes
from bdcore.study import Study, study_for
from tasks.evaluation import GridInputs, GridSlice, finish_grid, measure_context, measure_replay
from tasks.progress import ArtifactRef
from tasks.recording import record_grid
from tasks.targets import generate_targets, prepare_verifier
from tasks.tracking import connect
from tasks.training import make_base, train_drafter


class FailedCells(RuntimeError):
    """Some cells of the grid failed. Their rows carry the reasons; the others were measured."""


@flow(name="evaluation", flow_run_name="evaluation {config}")
def evaluation(
    config: str = "configs/quick.yaml",
    overrides: list[str] = [],  # noqa: B006 - as in flows.targets
    limit: int | None = None,
    mlflow_parent: str | None = None,
) -> ArtifactRef:
    """Measure the grid. Makes drafters that are missing; fails at its end when cells failed."""
    with study_for(config, overrides, limit) as study:
        verifier = prepare_verifier(study)
        made = generate_targets(study, verifier)
        base = make_base(study, verifier, made)
        trained = train_drafter(study, verifier, base, made)
        found = GridInputs(verifier, made, base, trained)
        slices = _measured(study, found)
        rows = finish_grid(study, slices)
        failed = sum(piece.failed for piece in slices)
        record_grid(connect(study, parent=mlflow_parent), study, parent=mlflow_parent, failed=failed)
        if failed:
            raise FailedCells(f"{failed} of {rows.rows} samples failed; `budgetdraft report {config}` lists them")
        return rows


def _measured(study: Study, found: GridInputs) -> list[GridSlice]:
    grid = study.config.grid
    slices = [measure_context(study, found, context) for context in grid.contexts if writes(grid)]
    return [*slices, measure_replay(study, found)] if REPLAY in grid.workloads else slices


if __name__ == "__main__":
    evaluation()
