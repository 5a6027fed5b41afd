"""The configuration: paper defaults, overrides, and every mistake in one line that says what would be legal."""

from pathlib import Path

import pytest
import yaml

from bdcore.config import (
    Config,
    ConfigError,
    DrafterConfig,
    GridConfig,
    LossConfig,
    SparseConfig,
    TrainingConfig,
    ViewsConfig,
    load_config,
)
from bdcore.kv.budget import FULL

CONFIGS = Path(__file__).parents[2] / "configs"
QUICK = CONFIGS / "quick.yaml"


@pytest.fixture
def write(tmp_path):
    def written(content) -> Path:
        path = tmp_path / "study.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return path

    return written


def refusal(path, *overrides, limit=None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides), limit=limit)
    text = str(caught.value)
    assert "\n" not in text and text.strip()
    return text


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_configuration_loads_under_its_own_name(path):
    assert load_config(path).name == path.stem


@pytest.mark.parametrize("profile", ["quick", "cpu", "paper"])
def test_every_profile_measures_what_repetition_alone_gives(profile):
    assert "ngram" in load_config(CONFIGS / f"{profile}.yaml").grid.methods


def test_defaults_are_the_papers():
    training, grid = Config().training, Config().grid
    assert training.views.budgets == {256: 0.4, 512: 0.3, 1024: 0.2, 2048: 0.1}
    assert (training.learning_rate, training.steps, training.lam) == (1e-5, 5000, 0.5)
    assert training.prefix_lengths == {16128: 1.0} and training.continuation == 256
    assert training.detach_prefix and training.supervise == "continuation"
    assert training.loss_a == training.loss_c == LossConfig(ce=1)
    assert (training.views.policy, training.views.position_mode) == ({"attention_mass": 1}, {"absolute": 1})
    assert training.views.per_step == training.accumulate == training.processes == 1
    assert grid.budgets == [256, 512, 1024, 2048] and grid.contexts == [3800, 8192, 16384]
    assert Config().drafter.source == "JackFram/llama-68m"


def test_unknown_key_is_refused_with_the_legal_ones(write):
    text = refusal(write({"grid": {"budgetz": [64]}}))
    assert "grid.budgetz" in text and "unknown key" in text
    assert all(name in text for name in GridConfig.model_fields)


def test_unknown_section_is_refused_with_the_legal_sections(write):
    text = refusal(write({"gird": {}}))
    assert "gird" in text and all(name in text for name in Config.model_fields)


def test_unknown_key_deep_inside_an_optional_section_names_its_siblings(write):
    text = refusal(write({"base": {"views": {"polizy": "random"}}}))
    assert "base.views.polizy" in text and "policy" in text and "budgets" in text


@pytest.mark.parametrize("where", ["grid.budgets=[250]", "training.views.budgets={250: 1}"])
def test_budget_that_is_no_multiple_of_the_chunk_names_its_neighbours(where):
    text = refusal(QUICK, where)
    assert "budget = 250" in text and "248" in text and "256" in text


def test_budget_below_what_must_be_kept_names_the_smallest_legal_one(write):
    text = refusal(write({"grid": {"budgets": [4]}}))
    assert "budget = 4 " in text
    least = int(text.rsplit(" ", 1)[1])
    GridConfig(budgets=[least])
    with pytest.raises(ValueError):
        GridConfig(budgets=[least - 8])


def test_nearest_legal_budgets_are_legal():
    text = refusal(QUICK, "grid.budgets=[45]")
    for value in text.rpartition("legal: ")[2].split(" or "):
        GridConfig(budgets=[int(value)])


@pytest.mark.parametrize("value", ["0", "-8", "true", "64.5", "lots", "null"])
def test_budget_that_is_no_positive_number_of_tokens_is_refused(value):
    assert "budget" in refusal(QUICK, f"grid.budgets=[{value}]")


def test_full_is_a_legal_budget():
    assert load_config(QUICK, ["grid.budgets=[64, full]"]).grid.budgets == [64, FULL]
    assert load_config(QUICK, ["training.views.budgets={64: 1, full: 1}"]).training.views.budgets == {64: 1, FULL: 1}


def test_overrides_reach_nested_fields_and_are_read_as_yaml():
    config = load_config(QUICK, ["training.views.budgets={64: 1}", "grid.gammas=[2, 4]", "runtime.device=cpu"])
    assert config.training.views.budgets == {64: 1.0}
    assert config.grid.gammas == [2, 4] and config.runtime.device == "cpu"
    assert config.training.steps == load_config(QUICK).training.steps


def test_override_can_fill_a_section_that_is_empty_or_absent(write):
    path = write("grid:\nbase: null\n")
    assert load_config(path, ["grid.prompts=2", "tracking.enabled=false"]).grid.prompts == 2


def test_override_of_one_section_leaves_those_that_share_a_yaml_alias(write):
    path = write("drafter: {kind: sliced}\nbase: &one {steps: 7, warmup: 0, views: {policy: random}}\ntraining: *one\n")
    config = load_config(path, ["training.steps=9", "training.views.policy=last_key"])
    assert config.base is not None
    assert (config.base.steps, config.base.views.policy) == (7, {"random": 1})
    assert (config.training.steps, config.training.views.policy) == (9, {"last_key": 1})


@pytest.mark.parametrize("override", ["grid.prompts", "=3", "name.first=x", "grid.gammas=[1", "nothing.at.all=1"])
def test_malformed_override_is_one_line(override):
    assert override.partition("=")[0].partition(".")[0] in refusal(QUICK, override)


def test_limit_lowers_the_prompts_and_never_raises_them(write):
    assert load_config(QUICK, limit=1).grid.prompts == 1
    assert load_config(QUICK, limit=100).grid.prompts == load_config(QUICK).grid.prompts
    assert load_config(write("{}"), limit=3).grid.prompts == 3
    assert load_config(write("grid:\n"), limit=3).grid.prompts == 3
    assert "limit = 0" in refusal(QUICK, limit=0)


@pytest.mark.parametrize("content", ["grid: 5", "grid: [1]", "grid: {prompts: few}", "corpus: 3", "base: yes"])
def test_section_of_the_wrong_kind_is_one_line_with_and_without_limit(write, content):
    path = write(content)
    name = content.partition(":")[0]
    assert name in refusal(path) and name in refusal(path, limit=2)


@pytest.mark.parametrize("content", ["- a\n- b\n", "just text", "a: [1,\nb: 2", "a:\n  b: 1\n c: 2\n"])
def test_file_that_is_no_configuration_is_one_line(write, content):
    assert "study.yaml" in refusal(write(content))


def test_file_that_is_absent_or_not_text_is_one_line(tmp_path):
    assert "absent.yaml" in refusal(tmp_path / "absent.yaml")
    assert str(tmp_path) in refusal(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"name: \xff\xfe\x00")
    assert "binary.yaml" in refusal(tmp_path / "binary.yaml")


def test_several_mistakes_are_one_line_that_names_each(write):
    text = refusal(write({"seed": -1, "grid": {"prompts": 0, "x": 1}, "training": {"lam": "much"}}))
    assert all(name in text for name in ("seed = -1", "grid.prompts = 0", "grid.x", "training.lam = 'much'"))


def test_relative_paths_are_resolved_against_the_configuration_file(write, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(
        write(
            {
                "corpus": {"source": "folder", "path": "texts"},
                "grid": {"corpus": {"source": "folder", "path": "../other", "split": "test"}},
                "verifier": {"source": "./model"},
            }
        )
    )
    assert config.corpus[0].path == str(tmp_path / "texts")
    assert config.grid.corpus[0].path == str(tmp_path.parent / "other")
    assert config.verifier.source == str(tmp_path / "model")


def test_hub_ids_and_absolute_paths_stay_as_they_are(write, tmp_path):
    config = load_config(write({"corpus": {"source": "folder", "path": str(tmp_path)}, "verifier": {"source": "a/b"}}))
    assert config.corpus[0].path == str(tmp_path) and config.verifier.source == "a/b"


def test_configuration_cannot_be_changed():
    with pytest.raises(ValueError):
        Config().seed = 3


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training.views.budgets={64: .nan}", "training.views.budgets"),
        ("training.views.budgets={64: 0}", "budgets"),
        ("training.views.budgets={64: -1, 128: 2}", "budgets"),
        ("training.lam=.inf", "training.lam"),
        ("training.prefix_lengths={512: 0}", "prefix_lengths"),
        ("training.prefix_lengths={4096: 1}", "targets.length"),
        ("training.mixture={forced: 0}", "mixture"),
        ("training.mixture={generated: 1}", "targets.generated"),
        ("training.supervise=continuation", "detach_prefix"),
        ("training.views.window=64", "window"),
        ("training.validation.sequences=1000", "targets.forced"),
        ("training.validation={sequences: 0, patience: 2}", "validation.patience"),
        ("training.validation={sequences: 0, keep: best}", "validation.keep"),
        ("training.views=quater", "views"),
        ("training.views.policy={oracle: 1}", "oracle"),
        ("training.views.policy=retrieval", "use attention_mass or attention_ahead"),
        ("training.views.position_mode={absolute: 0}", "position_mode"),
        ("training.loss_c={ce: 0}", "loss"),
        ("corpus=[]", "corpus"),
        ("grid.workloads=[replay, replay]", "workloads"),
        ("grid.corpus=[{source: needle}, {source: needle, filler: pg19}]", "grid: corpus: 2 are called `needle`"),
        ("grid.policy=[attention_mass, best]", "grid.policy"),
        ("grid.methods=[sd_full]", "ar"),
        ("grid.gammas=[4, 4]", "gammas"),
        ("grid.contexts=[]", "contexts"),
        ("grid.budgets=[full]", "sd_sparse"),
        ("drafter={kind: pretrained}", "base"),
        ("drafter.kind=pretrained", "drafter: num_layers = 5: a `pretrained` drafter"),
        ("drafter={kind: pretrained, layers: [0, 1]}", "drafter: layers = [0, 1]"),
        ("drafter={kind: pretrained, rope_theta: 1000}", "drafter: rope_theta = 1000"),
        ("drafter={kind: pretrained, max_positions: 512}", "drafter: max_positions = 512"),
        ("drafter.source=JackFram/llama-68m", "drafter: source = JackFram/llama-68m: a `sliced` drafter"),
        ("drafter.revision=main", "drafter: revision = main"),
        ("training.warmup=40", "training: warmup = 40: must be less than steps = 40"),
        ("base.steps=10", "base: warmup = 10: must be less than steps = 10"),
        ("drafter.layers=[1, 1]", "layers"),
        ("drafter.layers=[-1, 3]", "drafter.layers"),
        ("drafter.layers=[]", "drafter.layers"),
    ],
)
def test_settings_that_do_not_fit_together_are_one_line(override, named):
    overrides = [override]
    if "continuation" in override:
        overrides.append("training.detach_prefix=false")
    assert named in refusal(QUICK, *overrides)


def test_null_takes_back_what_the_other_kind_of_drafter_had():
    null = [f"drafter.{name}=null" for name in ("num_layers", "rope_theta", "max_positions")]
    config = load_config(QUICK, ["base=null", "drafter.kind=pretrained", *null])
    assert config.drafter == DrafterConfig(vocab_size=4096)
    dump = config.model_dump(mode="json")
    assert "num_layers" not in dump["drafter"] and Config.model_validate(dump) == config


def test_pretrained_drafter_cannot_be_the_embedded_verifier():
    text = refusal(QUICK, "base=null", "drafter={kind: pretrained, source: embedded}")
    assert "drafter.source = embedded" in text


def test_views_and_grid_share_one_rule_of_selection():
    assert set(SparseConfig.model_fields) <= set(ViewsConfig.model_fields) & set(GridConfig.model_fields)
    assert ViewsConfig().selection("random", 7) == GridConfig().selection("random", 7)


def test_longest_training_sequence_counts_the_longest_prefix():
    assert TrainingConfig(prefix_lengths={8: 1, 64: 0.5}, continuation=16).longest == 80
    assert TrainingConfig(prefix_lengths={8: 1, 64: 0.5, 128: 0}, continuation=16).longest == 80


def test_view_presets_are_the_papers_sampler_and_a_quarter_of_it():
    paper, quarter = (load_config(QUICK, [f"training.views={name}"]).training.views for name in ("paper", "quarter"))
    assert paper == ViewsConfig() and paper.budgets == {256: 0.4, 512: 0.3, 1024: 0.2, 2048: 0.1}
    assert {4 * budget: weight for budget, weight in quarter.budgets.items()} == paper.budgets


def test_one_value_stands_for_a_list_or_for_all_the_weight():
    config = load_config(QUICK, ["grid.policy=sink_recent", "training.views.policy=random"])
    assert config.grid.policy == ["sink_recent"] and config.training.views.policy == {"random": 1.0}
    assert [c.source for c in config.corpus] == ["stdlib"]


def test_overlay_merges_sections_and_replaces_values_lists_and_weights(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "name: base\ngrid: {prompts: 3, budgets: [64, 128]}\n"
        "training: {lam: 0.25, prefix_lengths: {512: 1, 1024: 1}, views: {sinks: 16, budgets: {64: 1, 128: 1}}}\n"
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "over.yaml").write_text(
        "extends: ../base.yaml\nname: over\ngrid: {budgets: [256]}\n"
        "training: {prefix_lengths: {256: 1}, views: {budgets: {256: 1}}}\n"
    )
    config = load_config(tmp_path / "sub" / "over.yaml", ["grid.new_tokens=7"])
    assert (config.name, config.grid.prompts, config.grid.budgets, config.grid.new_tokens) == ("over", 3, [256], 7)
    assert (config.training.lam, config.training.prefix_lengths) == (0.25, {256: 1})
    assert (config.training.views.budgets, config.training.views.sinks) == ({256: 1}, 16)


def test_overlay_keeps_paths_relative_to_the_file_that_names_them(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("corpus: {source: folder, path: texts}\n")
    (tmp_path / "sub" / "over.yaml").write_text("extends: ../base.yaml\nverifier: {source: ./model}\n")
    config = load_config(tmp_path / "sub" / "over.yaml")
    assert config.corpus[0].path == str(tmp_path / "texts")
    assert config.verifier.source == str(tmp_path / "sub" / "model")


@pytest.mark.parametrize(("text", "named"), [("extends: gone.yaml", "gone.yaml"), ("extends: 3", "extends = 3")])
def test_overlay_of_nothing_is_one_line(write, text, named):
    assert named in refusal(write(text))


def test_overlay_of_itself_is_one_line(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml")
    (tmp_path / "b.yaml").write_text("extends: a.yaml")
    assert "extends itself" in refusal(tmp_path / "a.yaml")


def test_override_reaches_into_a_list(write):
    path = write({"corpus": [{"source": "stdlib"}, {"source": "pg19"}]})
    config = load_config(path, ["corpus.1.path=/books", "corpus.0.split=test"])
    assert [(c.source, c.path, c.split) for c in config.corpus] == [
        ("stdlib", None, "test"),
        ("pg19", "/books", "train"),
    ]
    assert "2 is no entry" in refusal(path, "corpus.2.path=/books")
    assert "corpus.1.pth" in refusal(path, "corpus.1.pth=/books") and "split" in refusal(path, "corpus.1.pth=/books")


def test_parts_of_a_preset_can_be_changed_and_a_preset_replaces_what_was_there(tmp_path):
    (tmp_path / "base.yaml").write_text("training: {views: quarter}\n")
    (tmp_path / "over.yaml").write_text("extends: base.yaml\ntraining: {views: {position_mode: in_cache}}\n")
    (tmp_path / "back.yaml").write_text("extends: over.yaml\ntraining: {views: paper}\n")
    (tmp_path / "all.yaml").write_text(
        "training: {views: {budgets: {48: 1}, policy: random, per_step: 3, chunk: 12, sinks: 9, recent: 9, window: 4}}"
    )
    (tmp_path / "none.yaml").write_text("extends: all.yaml\ntraining: {views: paper}\n")
    quarter = load_config(QUICK, ["training.views=quarter"]).training.views
    over = load_config(tmp_path / "over.yaml", ["training.views.policy=random"]).training.views
    assert over == quarter.model_copy(update={"position_mode": {"in_cache": 1.0}, "policy": {"random": 1.0}})
    assert load_config(tmp_path / "back.yaml").training.views == ViewsConfig()
    assert load_config(tmp_path / "none.yaml").training.views == ViewsConfig()
    assert load_config(tmp_path / "base.yaml").training.views == quarter
