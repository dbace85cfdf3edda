"""scripts/plot_run.py on a small made-up metrics.jsonl."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
spec = importlib.util.spec_from_file_location("plot_run", ROOT / "scripts" / "plot_run.py")
assert spec and spec.loader
plot_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plot_run)


def write_run(folder: Path, steps: int = 4, tail: str = "") -> Path:
    rows: list[dict[str, float | None]] = [{"step": 0, "val/f1/mean": 0.1, "val/search_depth/mean": 0.25}]
    for step in range(1, steps + 1):
        rows.append(
            {
                "step": step,
                "critic/score/mean": step / 10,
                "reward/f1": step / 8,
                "behavior/search_depth": step / 2,
                "actor/grad_norm": None if step == 2 else 1 / step,  # a NaN is logged as null
                "timing_s/gen": 3.0,
                "timing_s/old_log_prob": 0.5,
                "timing_s/ref_log_prob": 0.25,
                "timing_s/update_actor": 1.0,
                "timing_s/step": 5.0,
            }
        )
    rows.append({"step": steps, "val/f1/mean": 0.6, "val/search_depth/mean": 2.0})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail, encoding="utf-8")
    return folder


def test_series_skip_what_is_no_number_and_merge_lines_of_a_step(tmp_path: Path) -> None:
    run = plot_run.load_run(write_run(tmp_path / "demo", tail='{"step": 5, "critic/sco'))
    assert (run.name, run.steps) == ("demo", [0, 1, 2, 3, 4])
    steps, values = run.series("actor/grad_norm")
    assert steps.tolist() == [1, 3, 4]
    assert values.tolist() == [1, 1 / 3, 1 / 4]
    assert run.series("val/f1/mean")[0].tolist() == [0, 4]
    assert len(run.series("nothing")[0]) == 0


def test_panels_show_the_values(tmp_path: Path) -> None:
    run = plot_run.load_run(write_run(tmp_path / "demo"))
    axes = {axes.get_title(loc="left"): axes for axes in plot_run.draw([run]).axes}
    curve, rings = axes["F1"].lines
    assert curve.get_xydata().tolist() == [[1, 0.125], [2, 0.25], [3, 0.375], [4, 0.5]]
    assert (rings.get_xydata().tolist(), rings.get_marker()) == ([[0, 0.1], [4, 0.6]], "o")
    assert axes["Gradient norm"].get_yscale() == "linear"  # 1 to a quarter
    assert [text.get_text() for text in axes["Entropy"].texts] == ["not logged"]
    # bottom up: generation 3, log-probs .75, update 1, sync 0, other .25, together the step
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in axes["Seconds a step"].collections]
    assert tops == pytest.approx([3, 3.75, 4.75, 4.75, 5])


def test_gradient_that_explodes_is_drawn_on_a_logarithmic_axis(tmp_path: Path) -> None:
    rows = [{"step": step, "actor/grad_norm": value} for step, value in enumerate([0.02, 0.0, 11500.0])]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    axes = plot_run.draw([plot_run.load_run(tmp_path)]).axes[4]
    assert axes.get_yscale() == "log"
    assert axes.lines[0].get_ydata().tolist() == [0.02, 11500.0]  # a logarithm of 0 can't be drawn


def test_headline_tells_the_change(tmp_path: Path) -> None:
    figure = plot_run.draw([plot_run.load_run(write_run(tmp_path / "demo"))])
    assert figure.get_suptitle() == "demo   ·   4 steps   ·   F1 0.10 → 0.60   ·   searches 0.25 → 2.00"


def test_several_runs_share_panels_and_are_named(tmp_path: Path) -> None:
    runs = [plot_run.load_run(write_run(tmp_path / name, steps)) for name, steps in (("one", 4), ("two", 6))]
    figure = plot_run.draw(runs)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two", "validation"]
    assert [len(line.get_xdata()) for line in figure.axes[7].lines] == [4, 6]


def test_smoothing_keeps_level_length_and_a_straight_line() -> None:
    assert plot_run.smooth(np.full(50, 3.0)).tolist() == [3.0] * 50
    line = np.arange(60.0)
    assert plot_run.smooth(line)[3:-3] == pytest.approx(line[3:-3])
    assert plot_run.smooth(np.array([0.0, 3.0, 0.0])).tolist() == [1.5, 1.0, 1.5]


def test_writes_beside_the_run_or_where_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "demo", steps=1)
    assert plot_run.main([str(folder)]) == 0
    assert (folder / "plot.png").read_bytes()[:4] == b"\x89PNG"
    out = tmp_path / "new" / "plot.svg"
    assert plot_run.main([str(folder / "metrics.jsonl"), "--out", str(out)]) == 0
    assert "<svg" in out.read_text(encoding="utf-8")
    assert capsys.readouterr().out.splitlines() == [str(folder / "plot.png"), str(out)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read (No such file or directory); give a run's folder"),
        ("", "has no finished step yet"),
        ('{"step": 1, "x"', "has no finished step yet"),
        ('{"step": 1}\nnonsense\n{"step": 2}\n', "line 2 is no metrics object with a step ('nonsense')"),
        ('{"loss": 1}\n{"step": 2}\n', "line 1 is no metrics object"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert plot_run.main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_image_of_unknown_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_run.main([str(write_run(tmp_path)), "--out", str(tmp_path / "plot.xyz")]) == 1
    assert "xyz" in capsys.readouterr().err
