"""Figures: every line has a look of its own, and a title stays clear of the legend beside it."""

from reports.looks import look
from reports.panels import legend_beside, panel_row
from reports.svg import draw, style


def test_each_of_many_lines_has_a_look_of_its_own() -> None:
    """With eight colours, markers and looks by number the ninth line was the first again."""
    looks = [tuple(look(i).values()) for i in range(32)]
    assert len(set(looks)) == len(looks)


def test_the_title_of_a_narrow_figure_does_not_run_into_the_legend() -> None:
    with style():
        figure, axes = panel_row(1)
        axes[0].plot([1, 2], [1, 2], label="base, budget 1024, attention_mass,\nabsolute")
        legend_beside(figure, axes)
        draw(figure, name="narrow", title="Where in a round drafts die", alt="", caption="")
        title, (legend,) = figure.texts[0].get_window_extent(), figure.legends
        assert title.x0 >= 0
        assert title.x1 < legend.get_window_extent().x0


def test_a_legend_of_many_lines_stays_within_the_figure() -> None:
    with style():
        figure, axes = panel_row(1)
        for i in range(14):
            axes[0].plot([1, 2], [1, i], label=f"sd_sparse (attention_mass {i},\nabsolute), budget 256")
        legend_beside(figure, axes)
        draw(figure, name="tall", title="Acceptance against context", alt="", caption="")
        extent = figure.legends[0].get_window_extent()
        assert extent.y0 >= 0 and extent.y1 <= figure.bbox.height
