#!/usr/bin/env python3
"""Runs the experiments of docs/experiments.md: every arm of configs/experiments/*.json with every seed, side by side.

  scripts/experiments.py [--jobs J] [--threads N] [--only vision,retrieval/msa] [--seeds 0,1,2] [--set KEY=VALUE]...

Needs the program (M3=path, else build/cpu/m3) and Python's standard library, no network. Each run is one single-threaded
`m3 train`, pinned to a core of its own, then `m3 eval`; of each only train.jsonl and measures.json stay. A run with
measures.json is done and is skipped; one that was killed goes on from its last checkpoint, so the script can be started
again at any time. At the end it writes report.md (means and spread over the seeds), results.json and curves.

An experiment's file: "set" for all its arms, "arms" with the keys of each ("same_as": another experiment's arm, whose
runs are shared), "eval": arguments of m3 eval (objects become JSON), "losses": sources of the training log to report, "charts": curves to draw.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import re
import shutil
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs/experiments"
LAST_SHARE = 0.1  # of the steps: what "at the end" means for losses of the log


def read_experiments():
    files = [f for f in sorted(CONFIGS.glob("*.json")) if f.name != "base.json"]
    return {f.stem: json.loads(f.read_text()) for f in files}


def one_cpu_per_core():
    """Allowed CPUs, the first of every core before its hyperthreads."""
    first, rest, seen = [], [], set()
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = siblings.read_text().strip() if siblings.exists() else str(cpu)
        (rest if core in seen else first).append(cpu)
        seen.add(core)
    return first, first + rest


class Run:
    def __init__(self, out, experiment, arm, seed, config):
        self.name = f"{experiment}/{arm}-{seed}"
        self.folder = out / experiment / f"{arm}-{seed}"
        self.keys = {**config.get("set", {}), **config["arms"][arm], "seed": seed}
        self.attention = self.keys.pop("eval_attention", "msa")
        self.eval = [word if isinstance(word, str) else json.dumps(word) for word in config["eval"]]

    def done(self):
        return (self.folder / "measures.json").exists()

    def call(self, command, options, cpus, log):
        """Runs a command; returns what went wrong. At the time limit m3 train saves and ends, to be resumed."""
        left = options.deadline - time.monotonic()
        if left <= 0:
            return "left for the next call"
        pin = (lambda: os.sched_setaffinity(0, cpus)) if cpus else None
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, preexec_fn=pin)
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            return "stopped by --limit"
        return None if code == 0 else f"m3 {command[1]} ended with {code}, see {log.name}"

    def run(self, options, cpus):
        """Trains and measures; returns (name, seconds, error or None)."""
        start = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        keys = {**self.keys, "output": str(self.folder)}
        overrides = [f"{key}={json.dumps(value)}" for key, value in keys.items()] + options.set
        train = [options.m3, "train", str(CONFIGS / "base.json"), "--resume", "--threads", str(options.threads)]
        for text in overrides:
            train += ["--set", text]
        with open(self.folder / "output.txt", "w") as log:
            error = self.call(train, options, cpus, log)
            if not error:
                model = sorted(self.folder.glob("step-*"))[-1]
                measure = [options.m3, "eval", str(model), "--corpus", "runs/experiments/corpus", "--attention",
                           self.attention, "--msa-only", "--threads", str(options.threads), "--out",
                           str(self.folder / "measures.json")]
                error = self.call(measure + self.eval, options, cpus, log)
        if error:
            return self.name, time.monotonic() - start, error
        for checkpoint in self.folder.glob("step-*"):
            shutil.rmtree(checkpoint)
        for name in (".lock", "output.txt"):
            (self.folder / name).unlink(missing_ok=True)
        return self.name, time.monotonic() - start, None


def prepare(options):
    """Corpus and tokenizer from the texts of this repository: its specifications and headers."""
    base = ROOT / "runs/experiments"
    if (base / "tokenizer/tokenizer.json").exists():
        return
    pages = base / "pages"
    shutil.rmtree(base / "corpus", ignore_errors=True)
    pages.mkdir(parents=True, exist_ok=True)
    for file in sorted((ROOT / "docs/spec").glob("*.md")):
        for i, part in enumerate(re.split(r"(?m)^(?=## )", file.read_text())):
            (pages / f"{file.stem}-{i:02d}.txt").write_text(part)
    for file in sorted((ROOT / "src").rglob("*.h")):
        (pages / ("-".join(file.relative_to(ROOT).parts) + ".txt")).write_text(file.read_text())
    subprocess.run([options.m3, "data", "make", str(base / "corpus"), "--text", f"pages={pages}"], cwd=ROOT, check=True)
    subprocess.run([options.m3, "data", "tokenizer", str(base / "tokenizer"), "--corpus", str(base / "corpus"), "--layout",
                    "tests/golden/tokenizer/tiny"], cwd=ROOT, check=True)
    shutil.rmtree(pages)


def run_all(runs, options):
    """J runs at a time, each on a CPU of its own while there are enough."""
    cores, cpus = one_cpu_per_core()
    jobs = options.jobs or max(1, len(cores) // options.threads)
    places = queue.Queue()
    for i in range(jobs):
        share = cpus[i * options.threads:(i + 1) * options.threads]
        places.put(set(share) if jobs * options.threads <= len(cpus) else None)

    def one(run):
        place = places.get()
        try:
            return run.run(options, place)
        finally:
            places.put(place)

    todo = [run for run in runs if not run.done()]
    print(f"{len(todo)} of {len(runs)} runs to do, {jobs} at a time", flush=True)
    errors = 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for future in concurrent.futures.as_completed([pool.submit(one, run) for run in todo]):
            name, seconds, error = future.result()
            errors += error is not None
            print(f"{name}: {error or 'done'} ({seconds:.0f} s)", flush=True)
    return errors


def results_of(run, losses):
    """Values of one run by name: measures, and losses of the log's last steps."""
    out = {}
    for m in json.loads((run.folder / "measures.json").read_text()):
        out[m["name"]] = {"value": m["value"], "unit": m["unit"], "chance": m["chance"]}
    records = [json.loads(line) for line in (run.folder / "train.jsonl").read_text().splitlines()]
    last = records[-max(1, int(LAST_SHARE * len(records))):]
    for source in losses:
        kind = "answer" if any("answer" in r["by_source"].get(source, {}) for r in last) else "plain"
        entries = [r["by_source"][source] for r in last if kind in r["by_source"].get(source, {})]
        count = sum(e[kind + "s"] for e in entries)
        if count:
            value = sum(e[kind] * e[kind + "s"] for e in entries) / count
            out[f"training loss at the end: {source}"] = {"value": value, "unit": "nats/token", "chance": None}
    norms = [r["groups"]["text"]["norm"] for r in records if r["groups"]["text"]["norm"] is not None]
    out["largest gradient norm of the text model"] = {"value": max(norms), "unit": "", "chance": None}
    skipped = sum("skipped" in r for r in records)
    if skipped:
        out["updates skipped"] = {"value": skipped, "unit": "", "chance": 0}
    selection = [s for r in last for s in r.get("selection", [])]
    for key in ("captured", "oracle", "block_recall", "score_recall"):
        values = [s[key] for s in selection if key in s]
        if values:
            out[f"selection: {key}"] = {"value": statistics.mean(values), "unit": "", "chance": None}
    totals = {"FLOP": sum(r["speed"]["flops"] for r in records), "tokens": sum(r["data"]["tokens"] for r in records),
              "vision tokens": sum(r["data"]["media_tokens"] for r in records)}
    out.update({key: {"value": value, "unit": "", "chance": None} for key, value in totals.items()})
    return out


def cell(values):
    shown = [f"{v:.3g}" if abs(v) < 1e4 else f"{v:.2e}" for v in (statistics.mean(values), min(values), max(values))]
    return shown[0] if len(values) == 1 or shown[1] == shown[2] else f"{shown[0]} ({shown[1]} to {shown[2]})"


def report(experiments, runs_of, options):
    """report.md, results.json and the curves."""
    options.out.mkdir(parents=True, exist_ok=True)
    text, results = "", {}
    for name, config in experiments.items():
        table = {}
        for arm in config["arms"]:
            values = [results_of(run, config.get("losses", [])) for run in runs_of(name, arm) if run.done()]
            if values:
                table[arm] = values
        if not table:
            continue
        results[name] = table
        rows = list(dict.fromkeys(row for values in table.values() for one in values for row in one))
        text += f"## {name}\n\n{config['about']}\n\nMean (least to most) of {max(map(len, table.values()))} seeds.\n\n"
        text += "| measure | " + " | ".join(table) + " | chance |\n|---|" + "---:|" * (len(table) + 1) + "\n"
        for row in rows:
            cells, found = [], None
            for values in table.values():
                numbers = [one[row]["value"] for one in values if row in one]
                found = next((one[row] for one in values if row in one), found)
                cells.append(cell(numbers) if numbers else "-")
            unit = f", {found['unit']}" if found["unit"] else ""
            chance = "" if found["chance"] is None else f"{found['chance']:.3g}"
            text += f"| {row}{unit} | " + " | ".join(cells) + f" | {chance} |\n"
        text += "\n"
        folders = [str(next(r for r in runs_of(name, arm) if r.done()).folder) for arm in table]
        for title in config.get("charts", []):
            svg = options.out / f"{name}-{re.sub('[^a-z0-9]+', '-', title.lower())}.svg"
            subprocess.run([options.m3, "plot", *folders, "--only", title, "--points", "60", "--out", str(svg)], cwd=ROOT)
    (options.out / "report.md").write_text(text)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m3", default=os.environ.get("M3", "build/cpu/m3"), help="the program")
    parser.add_argument("--out", default="runs/experiments", help="folder of the runs and of the report")
    parser.add_argument("--jobs", type=int, default=0, help="runs side by side (0: one a core)")
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    parser.add_argument("--only", default="", help="experiments, or experiment/arm: a list")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds; what is not done then is left for the next call")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for every run, for a larger size; with an --out of its own")
    parser.add_argument("--report", action="store_true", help="the report alone, of what is done")
    options = parser.parse_args()
    if options.set and options.out == parser.get_default("out"):
        parser.error("--set makes other runs than those of the default --out: name another folder")
    options.m3 = str((ROOT / options.m3).resolve())
    options.out = (ROOT / options.out).resolve()
    options.deadline = time.monotonic() + options.limit
    experiments = read_experiments()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    wanted = [word for word in options.only.split(",") if word]

    def runs_of(name, arm):
        shared = experiments[name]["arms"][arm].get("same_as")
        owner, its_arm = shared.split("/") if shared else (name, arm)
        return [Run(options.out, owner, its_arm, seed, experiments[owner]) for seed in seeds]

    known = set(experiments) | {f"{name}/{arm}" for name, config in experiments.items() for arm in config["arms"]}
    if not known.issuperset(wanted):
        parser.error(f"--only {options.only}: want some of {', '.join(sorted(known))}")
    runs = {}
    for name, config in experiments.items():
        for arm in config["arms"]:
            if not wanted or name in wanted or f"{name}/{arm}" in wanted:
                runs.update({run.name: run for run in runs_of(name, arm)})
    errors = 0
    if not options.report:
        prepare(options)
        errors = run_all(list(runs.values()), options)
    report(experiments, runs_of, options)
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
