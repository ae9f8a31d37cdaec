"""curves.py: whatever a log looks like, it can be read, drawn, summed up and compared."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import curves
from configs import UserError

ROOT = Path(__file__).parent.parent
GPT2_SETTINGS = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024,
                 "data_dir": "data/fineweb_edu"}


def steps(first, last, loss=5.0, per_step=1024, **more):
    return [{"step": s, "tokens": s * per_step, "loss": loss - s / 100, "lr": 1e-3, "tok_per_s": 1024.0,
             **more}
            for s in range(first, last + 1)]


def write(folder, rows, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail,
                                      encoding="utf-8")
    return folder


LOGS = {
    "nothing": ([], ""),
    "a start line only": ([{"event": "start", "settings": GPT2_SETTINGS}], ""),
    "one step": (steps(1, 1), ""),
    "an evaluation before the first step": ([{"step": 0, "val_loss": 10.8}], ""),
    "evaluations only": ([{"step": 0, "val_loss": 10.8}, {"step": 50, "val_loss": 9.8, "note": None}], ""),
    "NaN everywhere": ([{**row, "loss": float("nan"), "tok_per_s": float("inf")}
                        for row in steps(1, 500)], ""),
    "null, text and lists for numbers": ([{**row, "loss": None, "lr": "low", "tok_per_s": []}
                                          for row in steps(1, 9)], ""),
    "steps that are no numbers": ([{"step": "7", "loss": 1.0},
                                   {"step": float("nan"), "tokens": 5, "loss": 2.0}], ""),
    "a line cut by a power failure": (steps(1, 9), '{"step": 10, "tok'),
    "lines that are no objects": (steps(1, 9), '7\n"text"\n\x00\x00\x00\n[1]\n'),
    "two restarts": ([{"event": "start"}, *steps(1, 9), {"event": "start"},
                      *steps(6, 12), {"event": "start"}], ""),
    "a real size": ([{"event": "start", **GPT2_SETTINGS}, *steps(1, 900, per_step=2**19, power_w=400.0),
                     {"step": 900, "val_loss": 4.0},
                     {"step": 900, "hellaswag": 0.25, "hellaswag_norm": 0.26, "n": 10042}], ""),
    "no HellaSwag score but its key": ([*steps(1, 9), {"step": 9, "hellaswag_norm": None, "n": 0}], ""),
}


@pytest.mark.parametrize("kind", LOGS)
def test_any_log_can_be_read_summed_up_and_drawn(kind, tmp_path):
    folder = write(tmp_path / "run", *LOGS[kind])
    assert curves.summary(curves.read_log(folder)).startswith("run")
    curves.draw([folder], folder / "curves.png")
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("*.unfinished"))


@pytest.mark.parametrize("kind", LOGS)
def test_any_log_can_be_compared_with_another(kind, tmp_path):
    odd = curves.read_log(write(tmp_path, *LOGS[kind]))
    try:
        assert curves.compare([steps(1, 20), odd], ["sound", "odd"]).startswith("|")
    except UserError as error:
        assert "no losses yet" in str(error)


def test_all_logs_can_be_drawn_into_one_picture(tmp_path):
    curves.draw([write(tmp_path / kind, *log) for kind, log in LOGS.items()], tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


def test_lines_that_cannot_be_read_are_counted_and_cost_nothing_else(tmp_path):
    log = curves.read_log(write(tmp_path, steps(1, 9), 'not json\n\n{"step": 10, "tok'))
    assert log[:-1] == steps(1, 9)
    assert log[-1] == {"event": "unreadable", "lines": 2}
    assert "2 lines of the log could not be read" in curves.summary(log)


def test_a_sample_may_hold_any_character(tmp_path):
    # among them U+0085 and U+2028, at which Python's splitlines() cuts
    text = "".join(map(chr, range(0xD7FF)))
    (tmp_path / "log.jsonl").write_text(json.dumps({"sample": text}, ensure_ascii=False) + "\n",
                                        encoding="utf-8")
    assert curves.read_log(tmp_path) == [{"sample": text}]


def test_a_missing_log_is_one_line_with_the_name(tmp_path):
    with pytest.raises(UserError, match=r"log\.jsonl"):
        curves.read_log(tmp_path)
    with pytest.raises(UserError, match="nowhere"):
        curves.read_log(tmp_path / "nowhere")


def test_a_step_that_was_trained_again_after_a_restart_counts_once(tmp_path):
    log = [*steps(1, 9, loss=5.0), {"event": "start"}, *steps(6, 12, loss=4.0)]
    tokens, losses = curves.series(log, "loss")
    assert tokens.tolist() == [1024 * step for step in range(1, 13)]
    assert losses[4] == pytest.approx(4.95) and losses[5] == pytest.approx(3.94)


def test_an_evaluation_stands_at_the_tokens_of_its_step():
    log = [*steps(10, 10), {"step": 10, "val_loss": 3.0}, *steps(20, 20), {"step": 15, "val_loss": 2.5},
           {"step": 0, "val_loss": 11.0}, {"step": 25, "val_loss": 2.0}]
    tokens, losses = curves.series(log, "val_loss")
    assert tokens.tolist() == [0, 10240, 15360, 25600] and losses.tolist() == [11.0, 3.0, 2.5, 2.0]


def test_the_reference_is_the_average_of_two_public_runs():
    tokens, losses, hellaswag = curves.reference()
    assert tokens[-1] == 9_999_220_736
    assert (losses[-1] == pytest.approx((3.0663 + 3.0656) / 2)
            and hellaswag[-1] == pytest.approx((0.3058 + 0.3066) / 2))


@pytest.mark.parametrize("loss, verdict", [(3.10, "ahead"), (3.19, "on track"), (3.22, "on track"),
                                           (3.40, "behind")])
def test_on_track_compares_with_the_reference_at_the_same_tokens(loss, verdict):
    line = curves.on_track(5_111_808_000, loss, 0.291)
    assert line.startswith(verdict)
    assert "3.191" in line and "29.4%" in line and "29.1%" in line


@pytest.mark.parametrize("tokens, loss", [(0, 10.9), (1e6, 9.0), (2e10, 2.9), (5e9, None),
                                          (5e9, float("nan"))])
def test_on_track_says_nothing_where_the_reference_has_nothing_to_say(tokens, loss):
    assert curves.on_track(tokens, loss, None) == ""


def test_only_gpt2_on_fineweb_edu_is_held_against_the_reference():
    assert curves.comparable([{"event": "start", **GPT2_SETTINGS}])
    assert curves.comparable([{"event": "start", "settings": GPT2_SETTINGS}])
    assert not curves.comparable([{"event": "start", **GPT2_SETTINGS, "data_dir": "data/books"}])
    elsewhere = {"data_dir": "D:/shards", "data_source": "HuggingFaceFW/fineweb-edu"}
    assert curves.comparable([{"event": "start", "settings": GPT2_SETTINGS, **elsewhere}])
    assert not curves.comparable([{"event": "start", "settings": GPT2_SETTINGS, "data_source": "my_books"}])
    assert not curves.comparable([{"event": "start", **GPT2_SETTINGS, "n_layer": 24}])
    assert not curves.comparable(steps(1, 3))


def test_energy_is_power_times_the_time_that_the_steps_took():
    log = steps(1, 3600, power_w=400.0)   # one second a step
    hours, kwh, watts = curves.time_and_energy(log)
    assert hours == pytest.approx(1) and kwh == pytest.approx(0.4) and watts == pytest.approx(400)
    assert "0.4 kWh" in curves.summary(log)


def test_without_power_readings_no_energy_is_claimed():
    assert "kWh" not in curves.summary(steps(1, 100))
    assert "kWh" not in curves.summary(steps(1, 100, power_w=None))


def test_the_summary_tells_restarts_best_and_last_losses_apart():
    log = [{"event": "start"}, *steps(1, 4), {"step": 4, "val_loss": 4.0}, {"event": "start"}, *steps(5, 8),
           {"step": 8, "val_loss": 4.5}, {"step": 8, "warning": "loss spike"}]
    text = curves.summary(log)
    assert "8 steps" in text and "1 restart" in text and "1 warning" in text
    assert "loss 4.5000 at the end, best 4.0000 at 4.1k tokens" in text


def test_runs_are_compared_at_the_tokens_that_both_have_seen():
    slow = [*steps(1, 100), *[{"step": s, "val_loss": 5 - s / 100} for s in range(0, 101, 10)]]
    fast = [*steps(1, 80), *[{"step": s, "val_loss": 5 - s / 50} for s in range(0, 81, 10)]]
    rows = {cells[0]: cells[1:] for line in curves.compare([slow, fast], ["slow", "fast"]).splitlines()
            if (cells := [cell.strip() for cell in line.strip("|").split("|")])}
    assert rows["validation loss at 81.9k tokens"] == ["4.2000", "3.4000"]
    assert rows["validation loss at 20.5k tokens"] == ["4.8000", "4.6000"]
    assert rows["tokens to reach 4.0000"] == ["102k (1.00x)", "51.2k (0.50x)"]
    assert "kWh" not in rows and "HellaSwag at the end" not in rows


def test_runs_in_folders_of_one_name_are_told_apart():
    assert curves.labels(["out/a", "out/b"]) == ["a", "b"]
    assert curves.labels(["one/train", "two/train"]) == ["one/train", "two/train"]


def test_smoothing_keeps_a_straight_line_and_looks_past_nan():
    values = np.full(1000, 3.0)
    values[500:505] = np.nan
    smoothed = curves.smooth(values)
    assert np.isnan(smoothed[500:505]).all()
    assert np.allclose(np.delete(smoothed, range(500, 505)), 3.0)
    assert curves.smooth(np.array([2.0, 1.0])).tolist() == [2.0, 1.0]


@pytest.mark.parametrize("number, text", [(0, "0"), (999, "999"), (999_999, "1M"), (524_288, "524k"),
                                          (8.39e9, "8.39B")])
def test_numbers_are_shortened_for_reading(number, text):
    assert curves.short(number) == text


def command(*words, cwd):
    words = [sys.executable, ROOT / "curves.py", *words]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)


def test_one_command_redraws_a_run_or_compares_several(tmp_path):
    write(tmp_path / "a", steps(1, 20)), write(tmp_path / "b", steps(1, 20))
    one = command("a", cwd=tmp_path)
    assert one.returncode == 0 and "20 steps" in one.stdout and (tmp_path / "a" / "curves.png").exists()
    both = command("a", "b", cwd=tmp_path)
    assert both.returncode == 0 and "| " in both.stdout and (tmp_path / "a" / "compare.png").exists()


def test_a_wrong_folder_is_one_line_and_exit_code_1(tmp_path):
    result = command("nowhere", cwd=tmp_path)
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_importing_curves_imports_no_matplotlib():
    code = "import sys, curves; sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
