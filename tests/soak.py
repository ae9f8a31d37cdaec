"""Kills a stage with SIGKILL at many moments, lets it finish, and compares with the run that was left alone.

    python tests/soak.py prepare            over a slow local hub; about 10 minutes on two quiet cores
    python tests/soak.py train --kills=50   a small model with dropout and Muon; about 10 minutes

Run by hand; the suite kills a few times, too. There are 30 seeded moments, one in each 30th of the run, and
every second run is killed once more while it goes on.
"""

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def kill_and_compare(start, result, folder, kills, seed):
    """Starts, kills and finishes the run `kills` times; AssertionError if one ends with another result.

    start   folder -> Popen of a run that works in it
    result  folder -> what must be the same
    """
    rng = random.Random(seed)
    start_s = time.monotonic()
    finish(start(folder / "unbroken"))
    whole_s = time.monotonic() - start_s
    expected = result(folder / "unbroken")
    print(f"unbroken  {whole_s:.1f} s, {len(expected)} parts")
    for kill in range(kills):
        moments_s = [whole_s * (kill + rng.random()) / kills] + [whole_s * rng.random()] * (kill % 2)
        alive = []
        for moment_s in moments_s:
            run = start(folder / f"{kill}")
            time.sleep(moment_s)
            alive.append(run.poll() is None)
            run.send_signal(signal.SIGKILL)
            run.wait()
        done = len(result(folder / f"{kill}"))
        finish(start(folder / f"{kill}"))
        found = result(folder / f"{kill}")
        other = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
        assert not other, f"kill {kill} at {moments_s} gave another {other[0]}: {found.get(other[0])}"
        print(f"kill {kill + 1:>3}  at {' and '.join(f'{moment_s:.2f} s' for moment_s in moments_s)}: "
              f"{done} of {len(expected)} parts there, {'' if all(alive) else 'one run had ended already, '}"
              f"then the same bytes", flush=True)


def finish(run):
    said, _ = run.communicate()
    assert run.returncode == 0, said


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).glob("*.bin")}


def soak_prepare(folder, kills, seed):
    from hub import LocalHub
    from test_prepare_fineweb import parquet, start, texts

    documents = texts(1200)
    files = {f"sample/10BT/{i:03d}.parquet": parquet(documents[200 * i:200 * i + 200]) for i in range(6)}
    with LocalHub(files) as hub:
        hub.misbehave("cdn", pause=0.8)
        environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        kill_and_compare(lambda out_dir: start(out_dir, environment, dataset="someone/some-texts"),
                         hashes, folder, kills, seed)


class Forked:
    """A run of train.py in a fork of a process that has imported everything, with the methods of Popen."""

    def __init__(self, server, words, log):
        self.server, self.log, self.pid, self.returncode = server, log, server.start(words, log), None

    def poll(self):
        state = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        return 0 if state == "Z" else None

    def send_signal(self, number):
        os.kill(self.pid, number)

    def wait(self):
        self.returncode = self.server.wait(self.pid)

    def communicate(self):
        self.wait()
        return self.log.read_text(encoding="utf-8"), None


def soak_train(folder, kills, seed):
    import torch
    from test_train import Server, history, make_data, state, words

    (folder / "data").mkdir()
    data, server = make_data(folder / "data"), Server()  # start-up would be most of the time otherwise

    def start(out_dir):
        settings = words(data, out_dir, optimizer="muon", dropout=0.1, max_steps=60, save_every=7,
                         eval_every=10, sample_every=15, hellaswag_every=15)
        return Forked(server, settings, out_dir.with_suffix(".txt"))

    def result(out_dir):
        """Every bit of the last checkpoint, and the log but for times and restarts."""
        if not (out_dir / "ckpt.pt").exists():
            return {}
        saved, bits = state(out_dir), {}
        for i, tensor in enumerate(torch.utils._pytree.tree_leaves([saved["model"], saved["optimizers"]])):
            bits[i] = hashlib.sha256(tensor.numpy().tobytes()).digest() if torch.is_tensor(tensor) else tensor
        rows = [row for row in history(out_dir) if "tokens/s" not in row.get("warning", "")]  # a rate, too
        return {**bits, **{f"log {i}": row for i, row in enumerate(rows)}}

    kill_and_compare(start, result, folder, kills, seed)


PARTS = {"prepare": soak_prepare, "train": soak_train}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    for part in words.parts:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[part](Path(folder), words.kills, words.seed)


if __name__ == "__main__":
    main()
