"""Pictures of searches, and what `mgpu-tune plot` and `report` look at."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_ops import SPECS, MatmulProblem, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.registry import database
from mgpu_ops.tuning import storage
from mgpu_ops.tuning.bench import plot, report, results, sources
from mgpu_ops.tuning.outcome import Outcome

H200 = gpu.find("h200")
MATMUL = spec_of("matmul")
PROBLEM = MatmulProblem(512, 512, 512)
Command = Callable[..., Any]


def trial(us: float | None = 10.0, origin: str = "search", kind: str = "ok", **config: Any) -> plot.Trial:
    fields = {"tile_m": 64, "cluster": "none", "wide": False} | config
    return plot.Trial(origin, fields, kind, us, "" if kind == "ok" else "it <spills> $x", 12.0 if us else None)


def run_of(*trials: plot.Trial, **changes: Any) -> plot.Run:
    fields: dict[str, Any] = {"op": "matmul", "problem": "p 512x512x512", "gpu": "NVIDIA H200", "kind": "measured"}
    return plot.Run(**(fields | changes), trials=trials)


SEARCH = run_of(
    trial(None, "default", "compile"),
    trial(10.0, "near"),
    trial(14.0, "model", tile_m=128),
    trial(None, "search", "crash"),
    trial(9.0, "search", cluster="m"),
    trial(70.0, "odd one", wide=True),
    trial(9.5, "local", tile_m=192),
)


def check_pictures(paths: list[Path]) -> str:
    """Whole PNG and SVG files; the texts of the SVG, which matplotlib leaves as comments."""
    assert [path.suffix for path in paths] == [".png", ".svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    text = paths[1].read_text()
    ElementTree.fromstring(text)
    return text


# --- pictures


def test_titles_stay_within_a_narrow_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside: list[str] = []

    def look(figure: Any, path: Path, suffixes: object) -> list[Path]:
        figure.draw_without_rendering()
        figure.draw_without_rendering()  # the first time, axes get their places
        titles = [
            *(ax._left_title for ax in figure.axes),
            figure._suptitle,
            *([figure._supxlabel] if figure._supxlabel else []),
        ]
        outside.extend(t.get_text() for t in titles if t is not None and t.get_window_extent().x1 > figure.bbox.x1)
        return [path]

    monkeypatch.setattr(report, "save_figure", look)
    spec = spec_of("flash_attention_backward")
    plot.rates(
        plot.rows_of(spec, H200, database.read(database.shipped_path("h200", spec.name)).entries[:2]), tmp_path / "rates"
    )
    long = "4x16384x32x128 bfloat16 causal window=4095 bias=bfloat16 segments deterministic"
    plot.parameters(run_of(trial(10.0), trial(9.0, tile_m=128), op=spec.name, problem=long), tmp_path / "parameters")
    assert outside == []


def test_convergence_names_every_origin_and_the_best_trial(tmp_path: Path) -> None:
    text = check_pictures(plot.convergence(SEARCH, tmp_path / "c"))
    for word in (
        "near",
        "model",
        "search",
        "odd one",
        "local",
        "best so far",
        "failed",
        "baseline 12 us",
        "time (us)",
        "trial",
    ):
        assert f"<!-- {word} -->" in text
    assert "<!-- best 9 us at trial 5 of 7 -->" in text
    assert "matmul p 512x512x512 on NVIDIA H200 -->" in text


def test_a_modelled_search_says_that_it_is_not_measured(tmp_path: Path) -> None:
    modelled = dataclasses.replace(SEARCH, kind="modelled")
    for draw in (plot.convergence, plot.parameters):
        assert "MODELLED, not measured" in check_pictures(draw(modelled, tmp_path / "c"))


def test_parameters_shows_what_varies_and_tells_what_does_not(tmp_path: Path) -> None:
    trials = [dataclasses.replace(t, config={**t.config, "fixed": 7}) for t in SEARCH.trials]
    text = check_pictures(plot.parameters(run_of(*trials), tmp_path / "p"))
    for word in ("tile_m", "cluster", "wide", "192", "none", "True"):
        assert f"<!-- {word} -->" in text
    assert "<!-- always fixed=7 -->" in text
    assert "best of all, 9 us" in text


def test_failures_are_counted_by_kind_for_each_problem(tmp_path: Path) -> None:
    other = run_of(*[trial(None, kind="wrong")] * 3, trial(), problem="q 64x64x64")
    text = check_pictures(plot.failures([SEARCH, run_of(trial(), problem="fine"), other], tmp_path / "f"))
    for word in (
        "compile",
        "crash",
        "wrong",
        "2 of 7",
        "3 of 4",
        "p 512x512x512",
        "q 64x64x64",
        "matmul: failed trials by kind",
    ):
        assert f"<!-- {word} -->" in text
    assert "fine" not in text


def test_many_failing_problems_are_cut_and_the_rest_is_counted(tmp_path: Path) -> None:
    runs = [run_of(trial(None, kind="crash"), problem=f"number {i}") for i in range(30)]
    assert "<!-- and 6 of 6 more problems -->" in check_pictures(plot.failures(runs, tmp_path / "f"))


@pytest.mark.parametrize("draw", [plot.convergence, plot.parameters])
def test_without_a_time_there_is_no_picture(draw: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no trial worked"):
        draw(run_of(trial(None, kind="crash")), tmp_path / "x")
    with pytest.raises(ValueError, match="no parameter varies"):
        plot.parameters(run_of(trial(), trial(11.0)), tmp_path / "x")
    with pytest.raises(ValueError, match="no trial failed"):
        plot.failures([run_of(trial())], tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_names_are_text_whatever_is_in_them(tmp_path: Path) -> None:
    nasty = r"$\frac{ <script>alert(1)</script> --> & %s"
    trials = [dataclasses.replace(t, origin=nasty, config={nasty: number}) for number, t in enumerate(SEARCH.trials)]
    run = run_of(*trials, trial(None, kind=nasty), problem=nasty, gpu=nasty)
    for what, draw in (("c", plot.convergence), ("p", plot.parameters), ("f", lambda r, stem: plot.failures([r], stem))):
        assert "<script" not in check_pictures(draw(run, tmp_path / what))
    row = results.Measurement(nasty, nasty, results.OURS, "", 1.0, 0.1, 1.0, 1.0, 0.0, nasty, nasty, nasty, "2025-01-31")
    assert "<script" not in check_pictures(plot.rates([row], tmp_path / "r"))


def test_the_same_search_gives_the_same_bytes(tmp_path: Path) -> None:
    first, again = (plot.convergence(SEARCH, tmp_path / name / "c")[1].read_bytes() for name in "ab")
    assert first == again


@given(st.lists(st.text(), max_size=4))
def test_file_names_are_plain_and_never_the_same(texts: list[str]) -> None:
    taken: set[str] = set()
    names = [plot.slug(text, taken) for text in [*texts, *texts]]
    assert len(set(names)) == len(names)
    for name in names:
        assert name
        assert len(name) < 120
        assert name[0] not in ".-"
        assert all(c.isascii() and (c.isalnum() or c in ".-") for c in name)


# --- what is drawn


def study_of(place: Path, outcomes: dict[int, Outcome], origin: str = "search") -> None:
    """A study as the tuner leaves it in a journal: configs by raster_width."""
    versions = {"driver": "1.2", "jax": "0.11.2", "jaxlib": "0.11.2", "cuda": None}
    identity = storage.Identity.of(MATMUL, PROBLEM, H200, "measured", versions)
    study = storage.open_study(storage.open_storage(place), identity)
    default = MATMUL.default(PROBLEM, H200)
    for width, outcome in outcomes.items():
        told = {k: v for k, v in dataclasses.asdict(outcome).items() if v not in (None, "", ()) and k != "us"}
        told |= {"config": dataclasses.asdict(dataclasses.replace(default, raster_width=width)), "origin": origin}
        ok = outcome.kind == "ok"
        state = optuna.trial.TrialState.COMPLETE if ok else optuna.trial.TrialState.PRUNED
        study.add_trial(optuna.trial.create_trial(state=state, value=outcome.us if ok else None, user_attrs=told))
    study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL, user_attrs={"origin": "search"}))


OUTCOMES = {
    1: Outcome("ok", us=12.0, baseline_us=15.0),
    2: Outcome("compile", detail="spills 16 bytes"),
    4: Outcome("ok", us=10.0, baseline_us=15.0),
}


def test_a_journal_gives_the_finished_trials_of_its_studies(tmp_path: Path) -> None:
    place = tmp_path / "matmul.journal"
    study_of(place, OUTCOMES)
    optuna.create_study(storage=storage.open_storage(place), study_name="of somebody else")
    (run,) = sources.find([str(place)], SPECS).runs
    assert (run.op, run.problem, run.gpu, run.kind) == ("matmul", "512x512x512 bfloat16 nn", "NVIDIA H200", "measured")
    assert [(t.us, t.kind, t.detail, t.config["raster_width"]) for t in run.trials] == [
        (12.0, "ok", "", 1),
        (None, "compile", "spills 16 bytes", 2),
        (10.0, "ok", "", 4),
    ]
    assert (run.baseline_us, run.varying) == (15.0, ["raster_width"])
    assert run.failures == {("compile", "spills 16 bytes"): 1}


def test_a_journal_whose_problem_is_no_mapping_is_shown_as_it_is(tmp_path: Path) -> None:
    place = tmp_path / "matmul.journal"
    study_of(place, OUTCOMES)
    lines = place.read_text().splitlines(keepends=True)
    sound = next(line for line in lines if '"identity"' in line)
    changed = json.loads(sound)
    changed["user_attr"]["identity"]["problem"] = [512]
    place.write_text("".join(lines).replace(sound, json.dumps(changed) + "\n"))
    (run,) = sources.find([str(place)], SPECS).runs
    assert (run.problem, len(run.trials)) == ("[512]", 3)


def test_rates_are_those_of_measured_entries_with_baseline_and_roofline() -> None:
    path = database.shipped_path("h200", "flash_attention")
    spec, entries = spec_of("flash_attention"), database.read(path).entries
    rows = plot.rows_of(spec, H200, entries)
    for entry, line in zip(entries, results.comparisons(rows), strict=True):
        problem = database.to_problem(spec, entry.problem)
        assert line.ours is not None
        assert line.roofline is not None
        assert line.ours.tflops == pytest.approx(spec.flops(problem) / entry.evidence.median_us / 1e6)
        if not problem.lengths:  # whose roofline is that of full lengths
            assert line.roofline.median_us <= line.ours.median_us
        assert line.ratio(str(entry.evidence.baseline)) == pytest.approx(
            (entry.evidence.baseline_us or 0.0) / entry.evidence.median_us
        )
    modelled = [database.Entry(e.problem, e.config, msgspec.structs.replace(e.evidence, kind="modelled")) for e in entries]
    assert plot.rows_of(spec, H200, modelled) == []


def test_what_is_stored_is_right_and_collectives_have_a_bandwidth() -> None:
    """Whatever metric the stored error is of: only right results are stored."""
    for op in ("flash_attention_backward", "all_reduce"):
        rows = plot.rows_of(spec_of(op), H200, database.read(database.shipped_path("h200", op)).entries)
        assert rows
        assert not any(map(results.wrong, rows))
    assert {row.impl for row in rows} == {results.OURS, "xla"}
    for row in rows:
        assert (row.devices, row.tflops < 1) in ((2, True), (4, True))
        assert row.bus_gbs == pytest.approx(2 * (row.devices - 1) / row.devices * row.bytes / row.median_us / 1e3, rel=1e-4)


def test_a_yardstick_beside_a_stored_entry_stays_one() -> None:
    rows = plot.rows_of(spec_of("grouped_matmul"), H200, database.read(database.shipped_path("h200", "grouped_matmul")).entries)
    assert results.yardsticks(results.comparisons(rows)) == {"dense"}


# --- the command


def test_the_pictures_of_results_are_drawn_again_beside_their_files(tmp_path: Path, mgpu_tune: Command) -> None:
    """Each under its file's name, as `bench` drew it."""
    stamp = {"gpu": "NVIDIA H200", "driver": "1", "jax": "0.11.2", "date": "2025-01-31"}
    for name in ("a+grad.csv", "2025-jax-0.12.csv"):
        results.write_csv(
            [results.Measurement("matmul", "p 8x8x8", results.OURS, "c", 10.0, 0.1, 1.0, 1.0, 0.0, **stamp)], tmp_path / name
        )
    places = sorted(tmp_path.iterdir())
    done = mgpu_tune("plot", "--from", *places, "--in-place")
    assert (done.code, done.err) == (0, "")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {stem + suffix for stem in ("a+grad", "2025-jax-0.12") for suffix in (".csv", ".png", ".svg")}
    for words in ((), ("--from", tmp_path), ("matmul", "--from", places[0])):
        refused = mgpu_tune("plot", *words, "--in-place")
        assert refused.code == 2
        assert "name them with --from, such as --from results/*.csv" in refused.err


def test_every_result_has_its_pictures() -> None:
    results = Path(__file__).parents[3] / "results"
    missing = [f"{csv.stem}.png" for csv in results.glob("*.csv") if not csv.with_suffix(".png").exists()]
    assert not missing, "`make pictures` draws them"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "0.0", "x"])
@pytest.mark.parametrize("command", ["plot", "report"])
def test_a_time_that_is_none_is_refused_with_file_and_line(
    command: str, value: str, tmp_path: Path, mgpu_tune: Command
) -> None:
    csv = tmp_path / "some.csv"
    stamp = {"gpu": "NVIDIA H200", "driver": "1", "jax": "0.11.2", "date": "2025-01-31"}
    rows = [
        results.Measurement("matmul", "p 8x8x8", impl, "c", 10.0, 0.1, 1.0, 1.0, 0.0, **stamp) for impl in (results.OURS, "xla")
    ]
    results.write_csv(rows, csv)
    text = csv.read_text().splitlines()
    csv.write_text("\n".join([*text[:2], text[2].replace("10.0", value, 1)]) + "\n")
    done = mgpu_tune(command, "--from", csv, "--output", tmp_path / "out")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert f"{csv}, line 3: " in done.err
    assert not (tmp_path / "out").exists()


def test_plot_draws_all_there_is_of_a_journal_a_database_and_a_benchmark(tmp_path: Path, mgpu_tune: Command) -> None:
    study_of(tmp_path / "matmul.journal", OUTCOMES)
    shipped = database.shipped_path("h200", "ragged_contraction")
    csv = tmp_path / "some.csv"
    stamp = {"gpu": "NVIDIA H200", "driver": "1", "jax": "0.11.2", "date": "2025-01-31"}
    results.write_csv([results.Measurement("matmul", "p 8x8x8", results.OURS, "c", 10.0, 0.1, 1.0, 1.0, 0.0, **stamp)], csv)
    done = mgpu_tune("plot", "--from", tmp_path / "matmul.journal", shipped, csv, "--output", tmp_path / "out", "--json")
    document = json.loads(done.out)
    assert done.code == 0
    assert document["sources"] == [str(tmp_path / "matmul.journal"), str(shipped), str(csv)]
    names = {Path(path).name for picture in document["pictures"] for path in picture["files"]}
    stem = "matmul-512x512x512-bfloat16-nn"
    wanted = {"matmul-bench-tflops", "ragged-contraction-tuned-tflops", "matmul-failures"}
    wanted |= {f"{stem}-convergence", f"{stem}-parameters"}
    assert names == {name + suffix for name in wanted for suffix in (".png", ".svg")}
    assert names == {path.name for path in (tmp_path / "out").iterdir()}


def test_plot_of_one_op_leaves_the_others_out(tmp_path: Path, mgpu_tune: Command) -> None:
    study_of(tmp_path / "matmul.journal", OUTCOMES)
    words = ("--from", tmp_path / "matmul.journal", "--output", tmp_path / "out")
    assert mgpu_tune("plot", "flash_attention", *words).code == 2
    assert mgpu_tune("plot", "matmul", "--gpu", "h20", *words).code == 2
    assert not (tmp_path / "out").exists()
    assert mgpu_tune("plot", "matmul", "--gpu", "h200", *words).code == 0


def test_what_plot_leaves_of_a_search_on_this_machine(
    tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --from: one's own databases and journals."""
    monkeypatch.setenv("MGPU_OPS_STATE_DIR", str(tmp_path / "state"))
    study_of(storage.journal_path("h200", "matmul"), OUTCOMES)
    done = mgpu_tune("plot", "matmul", "--gpu", "h200", "--output", tmp_path / "out", "--json")
    document = json.loads(done.out)
    assert str(storage.journal_path("h200", "matmul")) in document["sources"]
    assert any("convergence" in picture["what"] for picture in document["pictures"])


def test_the_trials_of_a_storage_are_looked_at_where_they_are_asked_for(
    tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    study_of(tmp_path / "fleet.journal", OUTCOMES)
    monkeypatch.setenv(storage.VARIABLE, str(tmp_path / "fleet.journal"))
    words = ("report", "--no-pictures", "--output", tmp_path / "report.html", "--json")
    for asked in (("--storage",), ("--storage", tmp_path / "fleet.journal")):
        told = json.loads(mgpu_tune(*words, *asked).out)
        assert (told["sources"], told["searches"]) == ([str(tmp_path / "fleet.journal")], 1)
    assert json.loads(mgpu_tune(*words).out)["searches"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--from", "none"), "none: there is no such file"),
        (("--from", "empty"), "empty: holds neither databases, sweeps, journals nor CSV files"),
        (("--from", "bad.json"), "bad.json: is corrupt"),
        (("--from", "bad.csv"), "bad.csv: has columns"),
        (("--from", "binary.csv"), "binary.csv: "),
        (("--from", "bad.journal"), "bad.journal is no journal"),
        (("--from", "bad.json.gz"), "bad.json.gz is no sweep"),
        (("--from", "ftp://host/x"), "is no storage"),
        (("--from", "postgresql://me:secret@host/x"), "put the URL into $MGPU_OPS_STORAGE and say --storage"),
        (("--storage", "postgresql://me:secret@host/x"), "put the URL into $MGPU_OPS_STORAGE and leave it out here"),
        (("--storage",), "name the storage with --storage, or $MGPU_OPS_STORAGE"),
        (("--storage", "none.journal"), "none.journal: there is no such journal"),
        (("--gpu", "h20"), "there is nothing to"),
        (("--gpu", "v100"), "gpu='v100' is not a GPU"),
        (("softmax",), "op 'softmax' is not one of"),
        (("matmul", "--gpu", "h200", "--output", "file/out"), "cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("command", ["plot", "report"])
def test_a_wrong_request_names_the_place_and_the_way_out(
    command: str, words: tuple[str, ...], message: str, tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MGPU_OPS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("file").write_text("")
    for name in ("bad.json", "bad.csv", "bad.journal", "bad.json.gz"):
        Path(name).write_text("{oops\nand more\n")
    Path("binary.csv").write_bytes(b"\xff\xfe\x00")
    done = mgpu_tune(command, *words)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert "secret" not in done.out + done.err


def test_a_directory_is_searched_and_what_is_something_else_in_it_is_named(tmp_path: Path, mgpu_tune: Command) -> None:
    study_of(tmp_path / "matmul.journal", OUTCOMES)
    (tmp_path / "notes.json").write_text("[]")
    (tmp_path / "notes.csv").write_bytes(b"\xff")
    done = mgpu_tune("plot", "--from", tmp_path, "--output", tmp_path / "out")
    assert done.code == 0
    assert f"skipped: {tmp_path / 'notes.json'}: is corrupt" in done.out
    assert f"skipped: {tmp_path / 'notes.csv'}: " in done.out
    assert "convergence of matmul" in done.out
