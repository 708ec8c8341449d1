"""Calls that nobody thought of, of every op, by every variant that takes them, in many processes.

    PYTHONPATH=src:tests python tools/fuzz.py --device cuda --cases 10000 --jobs 15 \
        --limit-seconds 280 --out fuzz-results
    PYTHONPATH=src:tests python tools/fuzz.py --device cpu --cases 500 --ops softmax linear

What is drawn and how it is judged is in tests/fuzz. On a GPU most of the time goes into compiling:
there the kernels of each plan that was drawn get several cases, see tests/fuzz/fuzz_again.py.
Prints each case that went wrong as a line for tests/fuzz/test_fuzz_kept.py (a few of each op; all
are in the files of --out), then a table and a summary line. Exits with 1 if there
was such a case, also if a process died or got stuck over a call; with 3 if time ran out before all
cases were run, which ends calls that are still running. The same --seed draws the same ones.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 12  # plans that are drawn together: hypothesis makes later ones like earlier ones
REPEAT = {"cuda": 4, "cpu": 1}
STUCK_SECONDS = 240.0  # the first call has to load torch, and some have to compile
GRACE_SECONDS = 15.0  # for a call that runs when the time is over
SHOWN = 5  # mismatches printed per op
# An op is left alone when so many of its calls went wrong: one reason is enough.
ENOUGH = 20


def main() -> int:
    options = _options()
    for folder in ("tests/fuzz", "tests/conformance", "tests", "src"):
        sys.path.insert(0, str(ROOT / folder))
    if options.worker:
        return _work(options)
    return _lead(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--cases", type=int, default=10_000, help="calls in all (%(default)s)")
    parser.add_argument(
        "--repeat", type=int, help="calls for the kernels of one plan (4 on cuda, 1 on cpu)"
    )
    parser.add_argument("--jobs", type=int, default=10, help="processes (%(default)s)")
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=600.0,
        help="start no call later, and report what was done",
    )
    parser.add_argument("--seed", type=int, help="of the first calls; random by default")
    parser.add_argument("--ops", nargs="+", help="only these, or whatever has this in its name")
    parser.add_argument("--cache", help="a folder for kernels; by default one that is thrown away")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument(
        "--out",
        type=Path,
        help="a folder for results.json and mismatches.jsonl; each mismatch is appended as it "
        "occurs",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.repeat = options.repeat or REPEAT[options.device]
    if options.out is not None:
        options.json = options.json or options.out / "results.json"
    return options


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _lead(options: argparse.Namespace) -> int:
    from fuzz_families import FAMILIES

    names = [
        name for name in FAMILIES if not options.ops or any(word in name for word in options.ops)
    ]
    if not names:
        _say(f"no op has any of {options.ops} in its name; there are: {', '.join(FAMILIES)}")
        return 2
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory(prefix="gristmill-fuzz-") as folder:
        run = Run(names, options, seed, options.cache or folder)
        run.finish()
    return run.report()


class Run:
    """All calls of a run, handed out to processes chunk by chunk."""

    def __init__(
        self, names: list[str], options: argparse.Namespace, seed: int, cache: str
    ) -> None:
        self.options, self.seed, self.cache = options, seed, cache
        self.asked = options.cases
        self.started = time.monotonic()
        self.until = time.time() + options.limit_seconds
        self.lock = threading.Lock()
        self.cases: collections.Counter[str] = collections.Counter()
        self.plans: collections.Counter[str] = collections.Counter()
        self.seconds: collections.Counter[str] = collections.Counter()
        self.variants: dict[str, collections.Counter[str]] = {
            name: collections.Counter() for name in names
        }
        self.failures: list[dict[str, Any]] = []
        self.log = None if options.out is None else options.out / "mismatches.jsonl"
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self.log.write_text("")
        self.items: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        each, more = divmod(options.cases, len(names))
        left = {name: each + (place < more) for place, name in enumerate(names)}
        turn = 0
        # In turns, so that processes seldom wait for each other's compiles.
        while any(left.values()):
            for name in names:
                count = min(CHUNK * options.repeat, left[name])
                left[name] -= count
                if count:
                    self.items.put({"op": name, "count": count, "seed": seed + turn})
                    turn += 1

    def finish(self) -> None:
        threads = [threading.Thread(target=self._serve) for _ in range(self.options.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self) -> None:
        """One process after another: a new one if the last has died."""
        worker: Worker | None = None
        while time.time() < self.until:
            try:
                item = self.items.get_nowait()
            except queue.Empty:
                break
            failed = sum(one["op"] == item["op"] for one in self.failures)
            if failed >= ENOUGH:
                self.asked -= item["count"]
                continue
            if worker is None:
                worker = Worker(self.options, self.cache)
            if not worker.ask({**item, "until": self.until}, self._take):
                if worker.reason:
                    self._lost(item["op"], worker)
                worker.end(now=True)
                worker = None
        if worker is not None:
            worker.end()

    def _take(self, answer: dict[str, Any]) -> None:
        with self.lock:
            name = answer["op"]
            self.cases[name] += 1
            self.plans[name] += answer["first"]
            self.seconds[name] += answer["seconds"]
            self.variants[name].update(answer["variants"])
            if answer["mismatches"]:
                self._failed(*(answer[key] for key in ("op", "plan", "mismatches")))

    def _failed(self, op: str, plan: str, mismatches: list[str]) -> None:
        failure = {"op": op, "plan": plan, "mismatches": mismatches}
        self.failures.append(failure)
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(json.dumps(failure) + "\n")

    def _lost(self, name: str, worker: Worker) -> None:
        with self.lock:
            words = f"{worker.reason} over it; its last words: {worker.last_words()}"
            self.cases[name] += 1
            self._failed(name, worker.current, [words])

    def report(self) -> int:
        took = time.monotonic() - self.started
        wrong = collections.Counter(one["op"] for one in self.failures)
        for name in wrong:
            own = [one for one in self.failures if one["op"] == name]
            for one in own[:SHOWN]:
                _say("\n".join(one["mismatches"]))
                _say(f"    {one['plan']},\n")
            if len(own) > SHOWN:
                _say(f"and {len(own) - SHOWN} more of {name}\n")
        heads = f"{'plans':>7}{'cases':>7}{'runs':>8}{'mismatches':>12}{'seconds':>9}"
        _say(f"{'op':32}{heads}  variants")
        for name, variants in self.variants.items():
            each = ", ".join(f"{one} {count}" for one, count in sorted(variants.items()))
            numbers = f"{self.plans[name]:7}{self.cases[name]:7}{variants.total():8}"
            _say(f"{name:32}{numbers}{wrong[name]:12}{self.seconds[name]:9.1f}  {each}")
        if self.options.json is not None:
            self._write(took)
        cases, runs = self.cases.total(), sum(one.total() for one in self.variants.values())
        _say(
            f"{cases} of {self.asked} cases, of {self.plans.total()} plans, run {runs} times on "
            f"{self.options.device}, {len(self.failures)} mismatches, {took:.0f} s, "
            f"seed {self.seed}"
        )
        if self.failures:
            return 1
        return 3 if cases < self.asked else 0

    def _write(self, took: float) -> None:
        found = {
            "device": self.options.device,
            "seed": self.seed,
            "asked": self.asked,
            "repeat": self.options.repeat,
            "plans": self.plans.total(),
            "cases": self.cases.total(),
            "runs": sum(one.total() for one in self.variants.values()),
            "mismatches": len(self.failures),
            "seconds": round(took, 1),
            "ops": {
                name: {
                    "plans": self.plans[name],
                    "cases": self.cases[name],
                    "variants": dict(sorted(variants.items())),
                    "seconds": round(self.seconds[name], 2),
                }
                for name, variants in self.variants.items()
            },
            "failures": self.failures,
        }
        self.options.json.parent.mkdir(parents=True, exist_ok=True)
        self.options.json.write_text(json.dumps(found, indent=1) + "\n")


class Worker:
    """A process that makes calls: chunks go in, a line for each call comes out."""

    def __init__(self, options: argparse.Namespace, cache: str) -> None:
        self.current, self.reason = "", ""
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        command = [sys.executable, __file__, "--worker", "--device", options.device]
        command += ["--repeat", str(options.repeat)]
        self.process = subprocess.Popen(
            ["env", f"GRISTMILL_CACHE_DIR={cache}", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, item: dict[str, Any], take: Any) -> bool:
        """Whether all of a chunk was answered; if not, `reason` says why, but for the time."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(item) + "\n")
            self.process.stdin.flush()
        except OSError:
            self.reason = "a process died"
            return False
        while True:
            left = max(0.0, item["until"] - time.time()) + GRACE_SECONDS
            try:
                line = self.lines.get(timeout=min(STUCK_SECONDS, left))
            except queue.Empty:
                if left >= STUCK_SECONDS:
                    self.reason = f"a process was stuck for {STUCK_SECONDS:.0f} s"
                return False
            if line is None:
                self.reason = f"a process died ({self.process.wait()})"
                return False
            answer = json.loads(line)
            if "start" in answer:
                self.current = answer["start"]
            elif "end" in answer:
                return True
            else:
                take(answer)

    def last_words(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-2000:]

    def end(self, *, now: bool = False) -> None:
        if now:
            self.process.kill()
        elif self.process.stdin is not None:
            try:
                self.process.stdin.close()
                self.process.wait(20)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
        self.process.wait()
        self.errors.close()


def _work(options: argparse.Namespace) -> int:
    """In a process of its own: the calls of each chunk, one after another."""
    answers, sys.stdout = sys.stdout, sys.stderr

    def answer(**words: Any) -> None:
        answers.write(json.dumps(words) + "\n")
        answers.flush()

    import torch
    from fuzz_judge import judged
    from fuzz_run import each_plan

    torch.set_num_threads(1)
    for line in sys.stdin:
        item = json.loads(line)
        made = itertools.count()

        def body(call: Any, until: float = item["until"], made: Any = made) -> None:
            if time.time() > until:
                return
            first = next(made) % options.repeat == 0
            answer(start=repr(call))
            start = time.perf_counter()
            try:
                outcome = judged(call, options.device)
                if options.device == "cuda":
                    torch.cuda.synchronize()
            except Exception as error:
                if "CUDA error" in str(error) or "illegal" in str(error):
                    raise  # nothing that follows in this process can be believed
                variants, wrong = [], [f"{type(error).__name__}: {error}"]
            else:
                variants, wrong = outcome.variants, outcome.mismatches
            seconds = time.perf_counter() - start
            words = {"plan": repr(call), "variants": variants, "mismatches": wrong}
            answer(op=call.op, seconds=seconds, first=first, **words)

        how = {"shrink": False, "repeat": options.repeat}
        each_plan(item["op"], item["count"], item["seed"], body, **how)
        answer(end=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
