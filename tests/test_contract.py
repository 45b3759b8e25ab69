"""What every script promises on its command line, held against every script: wrong values, broken files, signals, reports."""
import contextlib
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from test_consistency import SCRIPTS, flags

ROOT = Path(__file__).parent.parent
TD = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py"]
GRID, CAR, REINFORCE = "gridworld_qlearning.py", "mountaincar_env.py", "reinforce_parallel.py"
LEARNERS = [name for name in SCRIPTS if name != CAR]
QUICK = "--xla_backend_optimization_level=0"  # compiles sooner, where neither speed nor bits matter

# Wrong values of each flag, by its name, or "SCRIPT FLAG" where a script has a row of its own; "=..." is put right after the flag.
NUMBER = "x, nan, inf, -inf, 1e400, 1,000, 0x10, "
COUNT = NUMBER + "0, -1, 0.5, "
SHARE = NUMBER + "-0.1, 1.1, 1e30"
RATE = NUMBER + "0, -1, 1e39"
FILE = "missing/x{end}, {file}/x{end}, /proc/x{end}, {long}{end}, {folder}{end}, {folder}, x, x{end}.txt, /, /dev/null"
WRONG = {
    "--seed": NUMBER + "-1, 0.5, 1e10", "--num-seeds": COUNT + "1e9, 1e30", "--num-envs": COUNT + "1e9, 1e30",
    "--total-timesteps": COUNT + "1e13", "replay_td.py --total-timesteps": COUNT + "1e13, 500",
    "epsilon_decay_td.py --total-timesteps": COUNT + "1e13, 500", "--num-iterations": COUNT + "1e10", "--log-interval": COUNT + "1e13",
    "--num-devices": COUNT + "3, 1e6, 2 --num-seeds 3", "--num-processes": COUNT + "3, 1e6",
    "--process-id": NUMBER + "-1, 0.5, 1, 2 --num-processes 2",
    "--coordinator": "host, host:x, host:", "--timeout": COUNT + "1e30",
    "--learning-rate": RATE + ", 0.1 x, 0.1 0", "gridworld_qlearning.py --learning-rate": SHARE + ", 0.1 x, 0.1 2",
    "--batch-size": COUNT + "1e9, 1e30, 1001", "parallel_td.py --batch-size": COUNT + "17, 8, 1e9, 1e30",
    "--buffer-size": COUNT + "8, 992, 100_001, 1e9, 1e30", "--learning-starts": COUNT + "31, 100_001, 2e6, 1e30",
    "--updates-per-step": COUNT + "1e9, 1e30", "--num-centers": COUNT + "1e9, 1e30", "--hidden-size": COUNT + "1e9, 1e30",
    "--tau": SHARE + ", 0", "--sigma": RATE, "--gamma": SHARE, "--epsilon": SHARE, "--epsilon-decay": SHARE + ", 0",
    "--start-e": SHARE + ", 0", "--end-e": SHARE + ", 1 --start-e 0.9",
    "--solved-at": RATE, "reinforce_parallel.py --solved-at": NUMBER + "1e39, -1e39",
    "--eval-episodes": NUMBER + "-1, 0.5, 1e30",
    "--grid-size": "x x, 8, 8 0, -8 12, 8 12.5, nan 12, 1e9 1e9, 1e6 1e6, 1 1, 8 12 1",
    "--start": "0, x 0, 0 0, 8 0, 0 12, -1 0, 0.5 0, nan 0",
    "--goal": "0, x 0, 7 11, 8 0, 0 12, -1 0, 0.5 0, nan 0", "--env-id": "nonsense, cartpole-v1, Asterix-MinAtar",
    "--policy": "nonsense, 0", "--sync": "nonsense, 0", "--baseline": "nonsense, 0", "--json": "=1", "--residual-gradient": "=1",
    "--no-early-stop": "=1", "--no-normalize": "=1", "--random-start": "=1", "--save": FILE, "--plot": FILE, "--gif": FILE,
    "--evaluate": "",  # what is in the file is the matter of load
}

SIZE = dict.fromkeys(TD[1:], "--num-centers 50 --sigma 1 --buffer-size 64 --learning-starts 32") | {
    TD[0]: "--num-centers 50 --sigma 1", CAR: "--num-envs 8", GRID: "--grid-size 3 4", REINFORCE: "--num-envs 2 --hidden-size 3"}
FEW = dict.fromkeys(TD, "--total-timesteps 192 --log-interval 64 --eval-episodes 2") | {
    CAR: "--total-timesteps 3200 --log-interval 1600", GRID: "--total-timesteps 3000 --log-interval 1000 --learning-rate 0",  # no path
    REINFORCE: "--num-iterations 3 --log-interval 1 --eval-episodes 2"}
LONG = dict.fromkeys(TD, "--total-timesteps 1e9 --log-interval 6400 --eval-episodes 2 --no-early-stop") | {
    CAR: "--total-timesteps 1e7 --log-interval 1600", GRID: "--total-timesteps 1e9 --log-interval 10000",
    REINFORCE: "--num-iterations 1e6 --log-interval 5 --eval-episodes 2 --no-early-stop"}
PROGRESS = r"\w+\.py: |compiled in |step |iteration |replay buffers |[\d,]+ steps in |learning rate |  "

REPORT = dict(script=str, env=str, args=dict, versions=dict, device=str, num_devices=int, seconds_to_compile=float, seconds_to_run=float,
              timesteps=float, steps_per_second=float, peak_memory_mb=float, runs=list)
ROW = dict.fromkeys([*TD, REINFORCE], "seed learning_rate solved_at training_return eval_mean eval_std eval_min") | {
    GRID: "seed learning_rate path_length start_value", CAR: "seed episodes goal_share return_mean return_std"}
KEPT = dict.fromkeys(TD, dict(centers=(2, 50, 4), weights=(2, 50, 2))) | {  # by --save, of two runs
    GRID: dict(q_table=(2, 3, 4, 4)), REINFORCE: dict(w0=(2, 4, 3), b0=(2, 3), w1=(2, 3, 2), b1=(2, 2)),
    CAR: dict(obs=(400, 8, 2), action=(400, 8), reward=(400, 8), terminated=(400, 8), truncated=(400, 8), final_observation=(400, 8, 2))}


def command(script, *texts, shell="", options=()):
    """The command line that runs a script as a user does, after a line of shell where one is given."""
    python = [sys.executable, *options, str(ROOT / script), *" ".join(map(str, texts)).split()]
    return ["sh", "-c", shell + ' exec "$@"', "sh", *python] if shell else python


def run(*line, env={}, **options):
    """Run a script to its end, in a folder where nothing can be written; returns the finished process, its output as text."""
    env = dict(PATH=os.environ["PATH"], XLA_FLAGS=QUICK) | env
    options = dict(args=command(*line, **options), cwd="/proc", env=env, start_new_session=True)
    return subprocess.run(**options, capture_output=True, text=True, timeout=120)


def assert_one_line(process, code):
    """It ended with this code and one line on standard error, no traceback; returns that line."""
    assert process.returncode == code and len(process.stderr.splitlines()) == 1 and "Traceback" not in process.stderr, process.stderr
    return process.stderr


def piped(script):
    """A run of hours as in `| head -1`: its first line, exit code and standard error."""
    with subprocess.Popen(command(script, SIZE[script], LONG[script]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=os.environ | dict(XLA_FLAGS=QUICK)) as process:
        try:
            first = process.stdout.readline()
            process.stdout.close()
            return first, process.wait(timeout=60), process.stderr.read()
        finally:
            process.kill()


def saved_and_loaded(script, folder):
    """Two runs of a few steps with every report, then what was saved, evaluated: without a terminal, HOME, or a folder to write in."""
    path, nowhere = folder / script, dict(HOME="/proc/nonexistent")
    runs = "" if script == CAR else "--num-seeds 2"
    first = run(script, SIZE[script], FEW[script], runs, f"--json --save {path}.npz --plot {path}.png", shell="exec <&-;")
    again = f"{SIZE[script]} {FEW[script]}" if script == CAR else f"--evaluate {path}.npz"
    return first, run(script, again, f"--plot {path}.again.png", shell="exec <&-;", env=nowhere)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """What takes long, two at a time, beside the tests that follow: {(script, what): its future}, and the folder of its files."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "text.npz").write_text("no")
    with ThreadPoolExecutor(2) as pool:
        later = {(script, "saved"): pool.submit(saved_and_loaded, script, folder) for script in SCRIPTS}
        later |= {(script, "piped"): pool.submit(piped, script) for script in SCRIPTS}
        later |= {(script, "foreign"): pool.submit(run, script, f"--evaluate {folder}/text.npz") for script in LEARNERS}
        later |= {(script, "exploding"): pool.submit(run, script, SIZE[script], LONG[script], "--learning-rate 0.01 1e38")
                  for script in [*TD, REINFORCE]}
        yield later, folder
        pool.shutdown(cancel_futures=True)


# --- wrong values


ROWS = [(script, flag) for script in SCRIPTS for flag in flags(script)]


def test_every_row_of_the_table_is_of_some_script():
    assert set(WRONG) <= {flag for _, flag in ROWS} | {f"{script} {flag}" for script, flag in ROWS}


@pytest.mark.parametrize("script, flag", ROWS)
def test_wrong_values_are_one_line_and_exit_code_2(script, flag, monkeypatch, capsys, tmp_path):
    """Every value of the row; and where the flag takes one, none, or an empty one. This machine has 16 GiB of memory."""
    values = WRONG.get(f"{script} {flag}", WRONG.get(flag))
    assert values is not None, f"no wrong values listed for {flag}"
    files = "{end}" in values
    end = {"--plot": ".png", "--gif": ".gif"}.get(flag, ".npz")
    (tmp_path / "file").touch()
    (tmp_path / f"folder{end}").mkdir()
    values = values.format(end=end, file=tmp_path / "file", folder=tmp_path / "folder", long="x" * 300)
    lines = [[flag + values]] if values[:1] == "=" else [f"{flag} {value}".split() for value in values.split(", ")] + [[flag]]
    lines += [[flag, ""]] * (values[:1] != "=" and flag != "--evaluate")
    module, accepted = importlib.import_module(script[:-3]), []
    monkeypatch.setattr(sys, "argv", [script])
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 2**22}.get)
    for line in lines:
        try:
            module.parse_args(line)
            accepted.append(line)
        except SystemExit as stop:
            usage, error = capsys.readouterr().err.splitlines()
            assert stop.code == 2 and usage.startswith(f"usage: {script}") and len(usage) < 100 and error.startswith(f"{script}: error: ")
            assert "functools" not in error  # it says what is allowed
            if files and line != [flag] and "cannot write" not in error:
                accepted.append(line)
    assert accepted == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_wrong_values_and_help_end_before_jax_is_imported(script):
    """A file is checked last of all values."""
    for flag, code in ("--plot /nonexistent/x.png", 2), ("--unknown 1", 2), ("--help", 0):
        process = run(script, flag, options=["-X", "importtime"])
        imports = [line for line in process.stderr.splitlines() if line.startswith("import time:")]
        assert any(line.endswith(" argparse") for line in imports) and not any(re.search(r"\b(jax|numpy)", line) for line in imports)
        assert process.returncode == code and len(process.stderr.splitlines()) - len(imports) == code  # usage and error, or nothing
    assert set(re.findall(r"^  (--[\w-]+)", process.stdout, re.MULTILINE)) == set(flags(script))


# --- broken files


def spoiled(script, original):
    """What may stand in the place of a file that --save wrote: {what: its bytes, or its arrays}."""
    good = dict(np.load(original))
    content = dict(empty=b"", text=b"no", foreign=dict(x=1)) | {f"cut at {n}": original.read_bytes()[:n] for n in (100, 1000, -100)}
    content |= {f"args {text}": good | dict(args=text) for text in ("", "{}", "[]", "{", "0")}
    for name, array in good.items():
        if name != "curve_timesteps":  # which only --plot needs
            content[f"no {name}"] = {other: good[other] for other in good if other != name}
        content[f"objects in {name}"] = good | {name: np.full(array.shape, None)}
    for name in KEPT[script]:
        content[f"{name} of another shape"] = good | {name: np.stack([good[name], good[name]], axis=-1)}
    return content


@pytest.mark.parametrize("script", LEARNERS)
def test_broken_files_are_one_line_and_exit_code_1(script, programs, tmp_path, monkeypatch, capsys):
    """The three TD scripts learn the same kind of function, and read each other's files."""
    later, folder = programs
    for name in SCRIPTS:
        later[name, "saved"].result()
    content = spoiled(script, folder / f"{script}.npz") | {"missing": None, "a folder": None}
    content |= {other: (folder / f"{other}.npz").read_bytes() for other in set(SCRIPTS) - set(TD if script in TD else [script])}
    (tmp_path / "a folder.npz").mkdir()
    module, refused = importlib.import_module(script[:-3]), []
    monkeypatch.setattr(sys, "excepthook", None)  # main sets its own, which says in one line what was raised
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for what, value in content.items():
        path = tmp_path / f"{what}.npz"
        if isinstance(value, bytes):
            path.write_bytes(value)
        elif value:
            np.savez(path, **value)
        with contextlib.suppress(SystemExit):  # the end of a report
            try:
                module.main(["--evaluate", str(path), "--json"] + ["--eval-episodes", "0"] * (script != GRID))
            except Exception as error:
                capsys.readouterr()
                sys.excepthook(type(error), error, None)
                line = capsys.readouterr().err
                assert line.startswith(f"'{path}' is not what --save of this script wrote: ") and line.count("\n") == 1
                refused.append(what)
    assert refused == list(content)
    assert "text.npz' is not what --save" in assert_one_line(later[script, "foreign"].result(), 1)


# --- reports


@pytest.mark.parametrize("script", SCRIPTS)
def test_reports_without_a_terminal_a_home_or_a_folder_to_write_in(script, programs):
    later, folder = programs
    first, again = later[script, "saved"].result()
    assert first.returncode == 0 and len(first.stdout.splitlines()) == 1, first.stderr
    assert all(re.match(PROGRESS, line) for line in first.stderr.splitlines()) and "\ncompiled in " in first.stderr, first.stderr
    assert again.returncode == 0 and again.stdout.startswith(f"{script}: "), again.stderr
    assert all("matplotlib" in line.lower() for line in again.stderr.splitlines()), again.stderr  # which says that it misses its HOME
    assert all((folder / f"{script}{end}.png").read_bytes().startswith(b"\x89PNG") for end in ("", ".again"))
    report = json.loads(first.stdout, parse_constant=pytest.fail)  # NaN and Infinity, which are not JSON
    assert {name: type(report.get(name)) for name in REPORT} == REPORT | (dict(timesteps=int) if script == CAR else {})
    assert report["script"] == script and report["num_devices"] == 1 and report["peak_memory_mb"] > 50 and report["seconds_to_compile"] > 0
    assert {flag[2:].replace("-", "_") for flag in flags(script)} <= set(report["args"]) and {"python", "jax"} <= set(report["versions"])
    assert report["steps_per_second"] == pytest.approx(report["timesteps"] / report["seconds_to_run"])
    runs = 1 if script == CAR else 2
    assert [run["seed"] for run in report["runs"]] == list(range(runs))
    for row in report["runs"]:
        assert set(ROW[script].split()) <= set(row) and all(value is None or type(value) in (int, float) for value in row.values())
    saved = dict(np.load(folder / f"{script}.npz", allow_pickle=False))
    assert json.loads(str(saved["args"])) == report["args"]
    assert {name: saved[name].shape for name in KEPT[script]} == KEPT[script]
    assert all(np.isfinite(saved[name]).all() for name in KEPT[script])
    if script == CAR:
        assert report["timesteps"] == saved["action"].size
    else:
        assert saved["curve_timesteps"].shape == (3,) and saved["learning_rate"].shape == (2,)
        assert saved["curve_steps_per_episode" if script == GRID else "curve_return"].shape == (2, 3)
        assert report["timesteps"] == pytest.approx(2 * saved["curve_timesteps"][-1], abs=2)  # of all runs


@pytest.mark.parametrize("script", [*TD, REINFORCE])
def test_a_run_that_explodes_is_named(script, programs):
    line = assert_one_line(programs[0][script, "exploding"].result(), 1)
    assert re.match(r"(step|iteration) +[\d,]+: .*seed 0, learning rate 1e\+38$", line), line


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_closed_pipe_ends_the_program(script, programs):
    first, code, stderr = programs[0][script, "piped"].result()
    assert first.startswith(f"{script}: ") and (code, stderr) == (-signal.SIGPIPE, "")


# --- signals


def wait_until(happened, process):
    """Look every 10 ms whether it has happened, as long as the process runs."""
    while not happened():
        assert process.poll() is None
        time.sleep(0.01)


def hit(script, number, folder):
    """Start a run of hours; send it a signal up to 5 s after it has begun to listen, or up to 1 s after it has begun to learn."""
    draw, which = random.Random(f"{script} {number}").uniform, [signal.SIGINT, signal.SIGKILL][number % 2]
    learning, folder = number >= 7, folder / str(number)
    folder.mkdir()
    with open(folder / "stdout", "w") as stdout, open(folder / "stderr", "w") as stderr:  # a pipe would fill up
        line = command(script, SIZE[script], LONG[script], f"--save {folder}/x.npz", shell='trap "" INT;')  # not Python's handler
        process = subprocess.Popen(line, stdout=stdout, stderr=stderr, env=os.environ | dict(XLA_FLAGS=QUICK))
        try:
            status = Path(f"/proc/{process.pid}/status")
            wait_until(lambda: int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16) & 1 << signal.SIGINT - 1, process)
            imported = "jaxlib" in Path(f"/proc/{process.pid}/maps").read_text()
            if learning:
                wait_until(lambda: len(re.findall(r"(?m)^(?:step|iteration) ", (folder / "stdout").read_text())) > 1, process)  # saved
            time.sleep(delay := draw(0, 1) if learning else draw(0.05, 5))
            assert process.poll() is None
            process.send_signal(which)
            code = process.wait(timeout=60)
        finally:
            process.kill()
            process.wait()
    return f"{which.name} {delay:.2f} s after it began to {'learn' if learning else 'listen'}", which, code, folder, imported


@pytest.mark.parametrize("script", SCRIPTS)
def test_signals_at_any_moment_leave_a_whole_file_or_none(script, tmp_path):
    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(lambda number: hit(script, number, tmp_path), range(10)))
    for what, which, code, folder, _ in ends:
        stdout, stderr = ((folder / name).read_text() for name in ("stdout", "stderr"))
        assert (code, stderr) == (130 if which == signal.SIGINT else -signal.SIGKILL, ""), (what, code, stderr)
        files = {path.name for path in folder.iterdir()} - {"stdout", "stderr"}
        if which == signal.SIGINT:
            assert files == ({"x.npz"} if stdout else set()), what  # from the first line on, there is something to keep, and to say
            assert not stdout or re.search(r"^step" if script == CAR else r"^learning rate ", stdout, re.MULTILINE), (what, stdout)
        elif "learn" in what and script != CAR:  # which writes in the end
            assert "x.npz" in files, what
        if "x.npz" in files:
            saved = dict(np.load(folder / "x.npz", allow_pickle=False))
            assert KEPT[script].keys() | {"args"} <= saved.keys(), what
    assert not all(imported for *_, imported in ends)  # it listens before that, which takes a second
