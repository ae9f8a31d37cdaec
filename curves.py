"""Read what a run wrote: its picture, its summary, how it compares with other runs and a public reference.

reads   <folder>/log.jsonl of train.py or sft.py, configs/reference_curves.csv
writes  <folder>/curves.png for one run; compare.png in the first folder for several
run     python curves.py out/train              redraws the picture and prints the summary
        python curves.py out/train out/other    a Markdown table at equal tokens, the runs in one picture
time    about two seconds

train.py calls read_log, draw, on_track and summary behind a fence: nothing here can stop a run.
A log may be young, cut in the middle of a line, full of NaN, or written by several starts; all of it is read.
"""

import csv
import json
import math
import sys
from pathlib import Path

# first, as it explains a package that is missing
from configs import UserError, replacing, run

# isort: split
import numpy as np

REFERENCE = Path(__file__).parent / "configs" / "reference_curves.csv"
GPT2_HELLASWAG = 0.2955  # OpenAI's 124M, completion style, normalised per token (hellaswag.py)
GPT2_VAL_LOSS = 3.2924   # OpenAI's 124M on the first 100M tokens of FineWeb-Edu, as build-nanogpt measured it
GREY, TRAIN, VALIDATION = "#8a8f98", "#7fb0de", "#d9480f"
RUN_COLOURS = ["#1c6fba", "#d9480f", "#2b8a3e", "#7b3fa8", "#b08900", "#0b7285", "#c2255c", "#495057"]


# ------------------------------------------------------------------------------------------------------------
# Reading a log


def read_log(path):
    """The rows of a log.jsonl (or of the folder that holds one), oldest first, as dicts.

    Lines that are no JSON object, such as the last one after a power cut, are left out; if there were any,
    the list ends with {"event": "unreadable", "lines": how many}. Raises UserError if there is no such file.
    """
    path = Path(path)
    path = path / "log.jsonl" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give the out_dir of a run") from None
    rows, unreadable = [], 0
    for line in filter(str.strip, text.split("\n")):  # splitlines() would cut a sample at U+2028
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            unreadable += 1
    return rows + [{"event": "unreadable", "lines": unreadable}] * (unreadable > 0)


def is_number(value):
    """Whether it is a finite number; JSON knows integers that no float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def series(log, key):
    """The tokens at which `key` was logged, and its values: two float arrays, NaN where it was no number.

    What was logged by step alone stands between the rows that have tokens. Of a step that was logged twice
    (a restart went back), the last row counts.
    """
    tokens_of, value_of = {0: 0}, {}
    for row in log:
        step = row.get("step")
        if not is_number(step):
            continue
        if is_number(row.get("tokens")):
            tokens_of[step] = row["tokens"]
        if key in row:
            value_of[step] = float(row[key]) if is_number(row[key]) else math.nan
    end = max(tokens_of)
    per_step = tokens_of[end] / end if end else settings(log).get("tokens_per_step", 1)
    tokens_of[end + 10**9] = tokens_of[end] + per_step * 10**9  # np.interp would not go past the last point
    known = sorted(tokens_of)
    steps = sorted(value_of)
    tokens = np.interp(steps, known, [tokens_of[step] for step in known])
    return tokens, np.array([value_of[step] for step in steps], dtype=float)


def finite(log, key):
    """series(log, key) without the values that are NaN or infinite."""
    tokens, values = series(log, key)
    good = np.isfinite(values)
    return tokens[good], values[good]


def last(log, key):
    """The newest finite value of `key`; NaN if there is none."""
    values = finite(log, key)[1]
    return values[-1] if len(values) else math.nan


def settings(log):
    """What the last start line says about the run's settings; {} for a log without one."""
    start = next((row for row in reversed(log) if row.get("event") == "start"), {})
    return {**start, **(start["settings"] if isinstance(start.get("settings"), dict) else {})}


def restarts(log):
    """The tokens at which a run was started again."""
    steps, step = [], 0
    for row in log:
        if row.get("event") == "start":
            steps.append(step)
        elif is_number(row.get("step")):
            step = row["step"]
    return series(log + [{"step": step, "restart": 1} for step in steps[1:]], "restart")[0]


def made_up(log):
    """Whether HellaSwag was the tiny world's questions, for which GPT-2's own score means nothing."""
    return settings(log).get("hellaswag_source") == "tiny"


def hellaswag_key(log):
    return "hellaswag_norm" if any("hellaswag_norm" in row for row in log) else "hellaswag"


# ------------------------------------------------------------------------------------------------------------
# Am I on track?


def reference():
    """(tokens, val_loss, hellaswag), three arrays: two public runs of build-nanogpt's recipe, averaged.

    The same network and data as ours, evaluated on the same first 1.3M tokens of the validation shard.
    """
    with open(REFERENCE, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    keys = ("tokens", "val_loss", "hellaswag")
    tokens, *values = (np.array([float(row[key]) for row in rows]) for key in keys)
    at = np.unique(tokens)
    return at, *(np.array([column[tokens == t].mean() for t in at]) for column in values)


def comparable(log):
    """Whether the reference means anything for this run: GPT-2 124M on FineWeb-Edu."""
    said = settings(log)
    sizes = [said.get(key) for key in ("n_layer", "n_head", "n_embd", "block_size")]
    data = str(said.get("data_source") or said.get("data_dir")).replace("-", "_").lower()
    return sizes == [12, 12, 768, 1024] and "fineweb_edu" in data


def on_track(tokens, val_loss, hellaswag=None):
    """One line that puts a FineWeb-Edu run of the 124M model beside the reference at the same tokens.

    hellaswag is the normalised accuracy (0 to 1) or None. Returns "" where the reference has nothing to say:
    before it had trained (131M tokens), after its end (10B), or without a finite loss. "behind" is a loss
    that it had with 0.7 of the tokens: a schedule that decays late may lag so far.
    """
    ref_tokens, ref_loss, ref_hellaswag = reference()
    if not is_number(val_loss) or not ref_tokens[1] <= tokens <= ref_tokens[-1]:
        return ""
    there = np.interp(tokens, ref_tokens, ref_loss)
    behind = val_loss > np.interp(0.7 * tokens, ref_tokens, ref_loss) + 0.02
    verdict = "behind the reference" if behind else "ahead" if val_loss < there - 0.02 else "on track"
    text = f"{verdict}: validation {val_loss:.3f} (reference at {short(tokens)} tokens {there:.3f})"
    if is_number(hellaswag):
        text += f", HellaSwag {hellaswag:.1%} ({np.interp(tokens, ref_tokens, ref_hellaswag):.1%})"
    return text


# ------------------------------------------------------------------------------------------------------------
# After the run


def short(number):
    """8390000000 -> "8.39B": three digits and a letter, for tokens and rates."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def time_and_energy(log):
    """(hours, kWh, mean watts) of the steps, from tokens, tok_per_s and power_w; NaN without power readings.

    Evaluations, pauses and what a restart repeated are not in it: only what the rows themselves measured.
    """
    tokens, rates = series(log, "tok_per_s")
    seconds = np.nan_to_num(np.diff(tokens, prepend=0) / np.where(rates > 0, rates, np.nan))
    hours = seconds.sum() / 3600
    watts_at, watts = finite(log, "power_w")
    if not len(watts) or not hours:
        return hours, math.nan, math.nan
    kwh = (seconds * np.interp(tokens, watts_at, watts)).sum() / 3.6e6
    return hours, kwh, 1000 * kwh / hours


def short_hours(hours):
    unit = next((unit for unit in ((1, "h"), (1 / 60, "min")) if hours >= unit[0]), (1 / 3600, "s"))
    return f"{hours / unit[0]:.1f} {unit[1]}"


def count(number, thing):
    return f"{number:,} {thing}{'s' * (number != 1)}"


def summary(log):
    """A few aligned lines about a run, finished or not; nothing about what its log does not hold."""
    tokens, losses = series(log, "loss")
    hours, kwh, watts = time_and_energy(log)
    last_step = max((row["step"] for row in log if is_number(row.get("step"))), default=0)
    parts = (count(last_step, "step"), f"{short(max(tokens, default=0))} tokens",
             f"{short_hours(hours)} of steps", count(len(restarts(log)), "restart"))
    lines = [f"run        {', '.join(parts)}"]
    rates, memory = finite(log, "tok_per_s")[1], finite(log, "mem_gb")[1]
    if len(rates):
        most = f", {memory.max():.2f} GB at most" if len(memory) else ""
        lines.append(f"speed      {short(np.median(rates))} tokens/s (median){most}")
    for name, key in (("training", "loss"), ("validation", "val_loss")):
        where, values = finite(log, key)
        if len(values):
            best = values.argmin()
            lines.append(f"{name:<11}loss {values[-1]:.4f} at the end, "
                         f"best {values[best]:.4f} at {short(where[best])} tokens")
    scores = finite(log, hellaswag_key(log))[1]
    if len(scores):
        beside = "" if made_up(log) else f" (GPT-2 124M: {GPT2_HELLASWAG:.2%})"
        lines.append(f"HellaSwag  {scores[-1]:.2%} at the end, best {scores.max():.2%}{beside}")
    if math.isfinite(kwh):
        lines.append(f"energy     {kwh:.3g} kWh, {watts:.0f} W on average (the GPU alone)")
    unreadable = sum(row["lines"] for row in log if row.get("event") == "unreadable")
    for number, thing, what in ((int(np.sum(~np.isfinite(losses))), "logged step", "with no finite loss"),
                                (sum("warning" in row for row in log), "warning", "in the log"),
                                (unreadable, "line", "of the log could not be read")):
        if number:
            lines.append(f"note       {count(number, thing)} {what}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------
# Comparing runs


def labels(out_dirs):
    """The shortest distinct names: the last folder alone, or with as many parents as it takes."""
    parts = [Path(out_dir).resolve().parts for out_dir in out_dirs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def tokens_to_reach(log, key, level):
    """The tokens after which `key` was first at or below `level`; NaN if it never was."""
    where, values = finite(log, key)
    reached = np.flatnonzero(values <= level)
    if not len(reached):
        return math.nan
    near = slice(max(reached[0] - 1, 0), reached[0] + 1)  # the evaluation before, still above, and this one
    return np.interp(-level, -values[near], where[near])


def compare(logs, names):
    """A Markdown table of several runs: losses at a quarter, half ... of the tokens that all have seen."""
    key, what = "val_loss", "validation loss"
    if any(math.isnan(last(log, key)) for log in logs):
        key, what = "loss", "training loss"
    for log, name in zip(logs, names):
        if math.isnan(last(log, key)):
            raise UserError(f"the log of {name} holds no losses yet, so there is nothing to compare")
    ends = [finite(log, key)[0][-1] for log in logs]
    goal = last(logs[0], key)
    reach = [tokens_to_reach(log, key, goal) for log in logs]
    rates = [finite(log, "tok_per_s")[1] for log in logs]
    hours, kwh, _ = zip(*map(time_and_energy, logs))
    table = [(f"{what} at {short(part * min(ends))} tokens", "{:.4f}".format,
              [np.interp(part * min(ends), *finite(log, key), left=math.nan) for log in logs])
             for part in (0.25, 0.5, 0.75, 1)]
    table += [
        (f"{what} at the end", "{:.4f}".format, [last(log, key) for log in logs]),
        ("tokens in all", short, ends),
        (f"tokens to reach {goal:.4f}", lambda t: f"{short(t)} ({t / (reach[0] or 1):.2f}x)", reach),
        ("HellaSwag at the end", "{:.2%}".format, [last(log, hellaswag_key(log)) for log in logs]),
        ("tokens/s (median)", short, [np.median(rate) if len(rate) else math.nan for rate in rates]),
        ("time in training steps", short_hours, hours),
        ("kWh", "{:.3g}".format, kwh)]
    rows = [[title, *(form(value) if math.isfinite(value) else "-" for value in values)]
            for title, form, values in table if np.isfinite(values).any()]
    return markdown([["", *names], *rows])


def markdown(rows):
    """A table with its columns lined up, the first to the left, the others to the right; rows[0] heads it."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    cells = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    rule = "|" + "-" * (widths[0] + 2) + "".join("|" + "-" * (w + 1) + ":" for w in widths[1:]) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


# ------------------------------------------------------------------------------------------------------------
# The picture


def smooth(values):
    """A running mean, a hundredth of the run to each side, blind to NaN; a short run stays as it is."""
    good, kernel = np.isfinite(values), np.ones(len(values) // 100 * 2 + 1)
    if not len(values):
        return values
    total = np.convolve(np.where(good, values, 0), kernel, mode="same")
    return total / np.where(good, np.convolve(good, kernel, mode="same"), np.nan)


def draw(out_dirs, path):
    """Draw one run, or several together, to the PNG `path`: losses, HellaSwag, learning rate and tokens/s.

    The file appears by a rename; no display is needed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    logs, names = [read_log(out_dir) for out_dir in out_dirs], labels(out_dirs)
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY,
             "axes.grid": True, "grid.color": "#eceef1", "axes.titlelocation": "left", "axes.titlesize": 11,
             "axes.titleweight": "bold", "xtick.color": "#555b64", "ytick.color": "#555b64",
             "legend.frameon": False}
    with matplotlib.rc_context(style):
        with_hellaswag = any(len(finite(log, hellaswag_key(log))[0]) for log in logs)
        figure = Figure(figsize=(12, 7.2), dpi=130, layout="constrained")
        top = "LLLLHH" if with_hellaswag else "LLLLLL"
        panels = figure.subplot_mosaic([list(top), list(top), list("RRRSSS")])
        draw_losses(panels["L"], logs, names)
        if with_hellaswag:
            draw_hellaswag(panels["H"], logs)
        draw_strip(panels["R"], logs, "lr", "learning rate")
        draw_strip(panels["S"], logs, "tok_per_s", "tokens per second")
        ends = [series(log, key)[0][-1:] for log in logs for key in ("loss", "val_loss")]
        end = max(np.concatenate(ends), default=0)
        for panel in panels.values():
            panel.xaxis.set_major_formatter(lambda value, _: short(value))
            panel.set_xlim(0, 1.015 * end or 1)
        figure.suptitle(headline(logs, names, end), x=0.01, ha="left", fontsize=14)
        with replacing(path) as file:
            figure.savefig(file, format="png")


def headline(logs, names, end):
    """The picture's title: the run and its newest figures, or which runs."""
    if len(logs) > 1:
        return " · ".join(names)
    figures = [("training {:.3f}", last(logs[0], "loss")), ("validation {:.3f}", last(logs[0], "val_loss")),
               ("HellaSwag {:.1%}", last(logs[0], hellaswag_key(logs[0])))]
    return "   ".join([names[0], f"{short(end)} tokens"]
                      + [text.format(value) for text, value in figures if math.isfinite(value)])


def colours(logs):
    """(training, validation) colours of each run: two of them for a single run, one each for several."""
    several = [(RUN_COLOURS[i % len(RUN_COLOURS)],) * 2 for i in range(len(logs))]
    return several if len(logs) > 1 else [(TRAIN, VALIDATION)]


def draw_losses(panel, logs, names):
    panel.set_title("loss, nats per token")
    single, curves = len(logs) == 1, []
    if any(map(comparable, logs)):
        tokens, losses, _ = reference()
        panel.plot(tokens, losses, color=GREY, linewidth=1.2, linestyle="--", label="build-nanogpt, 2 runs")
        panel.axhline(GPT2_VAL_LOSS, color=GREY, linewidth=1.2, linestyle=":", label="GPT-2 124M")
    for log, name, (train, validation) in zip(logs, names, colours(logs)):
        tokens, losses = series(log, "loss")
        if single:
            panel.plot(tokens, losses, color=train, alpha=0.35, linewidth=0.7)
        where, checked = finite(log, "val_loss")
        name = (None, name) if len(where) else (name, None)
        training, name = ("training", "validation") if single else name
        width, alpha = (1.6, 1) if single else (1, 0.5)
        line(panel, tokens, smooth(losses), train, training, width, alpha)
        line(panel, where, checked, validation, name)
        curves += [(tokens, smooth(losses)), (where, checked)]
    if single:
        edge = {"transform": panel.get_xaxis_transform(), "linestyle": ""}
        sick, again = tokens[~np.isfinite(losses)], restarts(logs[0])
        for where, height, marker, colour, label in ((sick, 0.015, "|", "#c92a2a", "loss not finite"),
                                                     (again, 0.985, "v", GREY, "restart")):
            if len(where):
                heights = np.full(len(where), height)
                panel.plot(where, heights, marker, color=colour, markersize=8, label=label, **edge)
    # The fall from ln(50304) in the first steps would flatten everything that one wants to see.
    end = max((tokens[-1] for tokens, _ in curves if len(tokens)), default=0)
    shown = np.concatenate([losses[tokens >= 0.06 * end] for tokens, losses in curves])
    shown = shown[np.isfinite(shown)]
    if len(shown):
        pad = 0.06 * (shown.max() - shown.min()) + 0.02
        panel.set_ylim(shown.min() - pad, shown.max() + pad)
        panel.legend(loc="upper right")


def draw_hellaswag(panel, logs):
    panel.set_title("HellaSwag, normalised accuracy")
    panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    if any(map(comparable, logs)):
        tokens, _, scores = reference()
        panel.plot(tokens, scores, color=GREY, linestyle="--", linewidth=1.2)
    for log, (_, colour) in zip(logs, colours(logs)):
        where, scores = finite(log, hellaswag_key(log))
        questions = finite(log, "n")[1]
        if len(logs) == 1 and len(questions):
            error = np.sqrt(scores * (1 - scores) / questions[-1])
            panel.fill_between(where, scores - error, scores + error, color=colour, alpha=0.12, linewidth=0)
        line(panel, where, scores, colour)
    levels = [(0.25, "chance 25%", 0.98, "right")]
    if not any(map(made_up, logs)):
        levels.append((GPT2_HELLASWAG, f"GPT-2 124M {GPT2_HELLASWAG:.2%}", 0.02, "left"))
    for level, text, x, side in levels:
        panel.axhline(level, color=GREY, linestyle=":", linewidth=1.2)
        panel.annotate(text, (x, level), xycoords=panel.get_yaxis_transform(), xytext=(0, 3), ha=side,
                       textcoords="offset points", color="#555b64", fontsize=9, zorder=5,
                       bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1})


def draw_strip(panel, logs, key, title):
    panel.set_title(title)
    panel.set_xlabel("tokens")
    panel.yaxis.set_major_formatter(lambda value, _: short(value) if value >= 1 else f"{value:.2g}")
    highest = 0
    for log, (_, colour) in zip(logs, colours(logs)):
        tokens, values = series(log, key)
        line(panel, tokens, values, RUN_COLOURS[0] if len(logs) == 1 else colour, linewidth=1.2, alpha=0.85)
        highest = max(highest, np.nanmax(values, initial=0))
    panel.set_ylim(0, 1.1 * highest or 1)


def line(panel, tokens, values, colour, label=None, linewidth=1.8, alpha=1):
    """A curve; with dots where they are few, so that a run with a single value shows it too."""
    dots = "o" if len(tokens) < 40 else None
    panel.plot(tokens, values, color=colour, label=label if len(tokens) else None, marker=dots, markersize=4,
               linewidth=linewidth, alpha=alpha)


# ------------------------------------------------------------------------------------------------------------
# By hand


def main():
    out_dirs = sys.argv[1:]
    if not out_dirs or any(word.startswith("-") for word in out_dirs):
        print(__doc__)
        sys.exit(0 if out_dirs[:1] in (["--help"], ["-h"]) else 1)
    logs = [read_log(out_dir) for out_dir in out_dirs]
    folder = Path(out_dirs[0]) if Path(out_dirs[0]).is_dir() else Path(out_dirs[0]).parent
    picture = folder / ("curves.png" if len(logs) == 1 else "compare.png")
    print(summary(logs[0]) if len(logs) == 1 else compare(logs, labels(out_dirs)))
    try:
        draw(out_dirs, picture)
    except ImportError:
        raise UserError("the picture needs matplotlib: pip install -r requirements.txt") from None
    except OSError as error:
        raise UserError(f"{picture} cannot be written: {error.strerror}") from None
    print(f"\n{picture}")


if __name__ == "__main__":
    run(main)
