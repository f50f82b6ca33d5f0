"""How scripts end: whoever ends with an error says goodbye first, and the others go on at once."""

import os
import pty
import signal
import socket
import subprocess
import sys

import pytest
from scripts import scripts_in

from chaosnet.node.keys import KeyPair, save

pytestmark = pytest.mark.realtime

NEXT_STEP_S = 0.5
TIMES = int(os.environ.get("CHAOSNET_TEST_ENDINGS", "1"))

# A gradient of node n is its `share` everywhere, in several chunks that leave during backward. What a step changed
# is the mean of the shares that were counted, exactly.
TRAINS = """
import os, sys, threading, time, torch
from chaosnet import Cluster, Trainer
torch.set_num_threads(1)
share = float(sys.argv[1])
model = torch.nn.Linear(4096, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), 1.0)

def backward():
    (share * model.weight.sum()).backward()

def wanted():
    return os.path.exists(os.environ["CHAOSNET_NAME"] + ".ends")

def step(trainer):
    before = model.weight.detach().clone()
    backward()
    if wanted():
        time.sleep(0.02)
        print("ends", time.monotonic(), flush=True)
        return False
    trainer.update()
    change = (before - model.weight.detach()).unique().tolist()
    print("step", trainer.step, time.monotonic(), trainer.state_hash(), *change, flush=True)
    time.sleep(0.005)
    return True
"""
PLAIN = """
trainer = Trainer(model, optimizer, cluster=Cluster(chunk_bytes=4096))
while step(trainer):
    pass
"""
LINGERS = "threading.Thread(target=time.sleep, args=(60,)).start()\n"  # It keeps the process alive.
ENDINGS = {
    "raises": PLAIN + 'raise ValueError("bad record")',
    "exits": PLAIN + "sys.exit(1)",
    "interrupted": PLAIN + "raise KeyboardInterrupt",
    "with": 'with Trainer(model, optimizer, cluster=Cluster(chunk_bytes=4096)) as trainer:\n'
            '    while step(trainer):\n        pass\n    raise ValueError("bad record")',
    "lingers": LINGERS + PLAIN + 'raise ValueError("bad record")',
    "lingers-exits": LINGERS + PLAIN + "sys.exit(1)",
    "thread": LINGERS + "def work():\n" + "".join(f"    {line}\n" for line in PLAIN.splitlines())
              + '    raise ValueError("bad record")\nthreading.Thread(target=work).start()',
    "other-hook": PLAIN + 'sys.excepthook = lambda *args: None\nraise ValueError("bad record")',
}  # fmt: skip


def keys(folder):
    save(KeyPair.new(), folder / "key")
    return {"CHAOSNET_KEY": str(folder / "key")}


def shares_of(script):
    """What its steps changed: {step: the mean of the shares}. Sums of thirds are rounded."""
    changes = {
        int(line[0]): {round(float(change), 3) for change in line[3:]} for line in script.lines("step")
    }
    assert all(len(change) == 1 for change in changes.values()), "chunks differ in who was counted"
    return {step: change.pop() for step, change in changes.items()}


def end_one(folder, ending, count, index, by_command=False, **env):
    """Of `count` nodes the one at `index` ends so. Asserts that the others go on at once, without its share.

    Returns: what the others print, the exit code of the one, and the longest that one of the others needed.
    """
    folder.mkdir(exist_ok=True)
    with scripts_in(folder, **env) as scripts:
        for n in range(count):
            text = TRAINS + (ENDINGS[ending] if n == index else PLAIN)
            scripts.start(f"n{n}", text, str(float(1 << n)), by_command=by_command)
            scripts.started[-1].says("step ")
        for script in scripts.started:
            script.advance()
        ends, others = scripts.started[index], [s for s in scripts.started if s is not scripts.started[index]]
        (folder / f"{ends.name}.ends").touch()
        ends.says("ends ")
        ended_s = float(ends.lines("ends")[0][0])
        last = int(ends.lines("step")[-1][0])
        took_s = [script.ended_at_s(last + 1) - ended_s for script in others]
        for script in others:
            script.advance()
        without = sum(1 << n for n in range(count) if n != index) / (count - 1)
        for script in others:
            later = {step: shares for step, shares in shares_of(script).items() if step > last}
            assert later
            assert set(later.values()) == {without}
        hashes = [{line[0]: line[2] for line in script.lines("step")} for script in scripts.started]
        for step in set.intersection(*map(set, hashes)):
            assert len({each[step] for each in hashes}) == 1, f"states differ after step {step}"
        code = None if "lingers" in ending or ending == "thread" else ends.exit_code()
        assert max(took_s) <= NEXT_STEP_S, f"{took_s}\n{scripts.story()}"
        return [script.text() for script in others], code, max(took_s)


@pytest.mark.parametrize("index", [0, 1], ids=["senior", "junior"])
@pytest.mark.parametrize("keyed", [False, True], ids=["open", "keys"])
def test_of_two_nodes_the_other_goes_on_at_once_when_a_script_raises(tmp_path, index, keyed):
    took_s = []
    for n in range(TIMES):
        folder = tmp_path / str(n)
        folder.mkdir()
        told, code, slowest_s = end_one(folder, "raises", 2, index, **(keys(folder) if keyed else {}))
        took_s.append(slowest_s)
        assert code == 1
        assert f"n{index} leaves: its script ended with ValueError: bad record" in told[0]
        assert "waiting:" not in told[0]
    print(f"next step after {max(took_s):.3f} s at most, {sorted(took_s)[len(took_s) // 2]:.3f} s median")


@pytest.mark.parametrize("index", [0, 1], ids=["senior", "junior"])
def test_of_three_nodes_the_others_go_on_at_once_when_a_script_raises(tmp_path, index):
    for n in range(TIMES):
        told, code, _ = end_one(tmp_path / str(n), "raises", 3, index)
        assert code == 1
        assert all(f"n{index} leaves: its script ended with ValueError: bad record" in text for text in told)


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("interrupted", "KeyboardInterrupt"),
        ("with", "ValueError: bad record"),
        ("lingers", "ValueError: bad record"),
        ("thread", "ValueError: bad record"),
        ("other-hook", "ValueError: bad record"),
    ],
)
def test_so_they_do_however_the_error_comes(tmp_path, ending, reason):
    told, _, _ = end_one(tmp_path, ending, 2, 0)
    assert f"n0 leaves: its script ended with {reason}" in told[0]


@pytest.mark.parametrize("ending", ["exits", "lingers-exits"])
def test_a_script_that_exits_leaves_at_once(tmp_path, ending):
    told, _, _ = end_one(tmp_path, ending, 2, 0)
    assert "n0 asks to leave" in told[0]


@pytest.mark.parametrize(
    ("ending", "reason"),
    [("raises", "ValueError: bad record"), ("exits", "exit code: 1"), ("interrupted", "KeyboardInterrupt")],
)
def test_so_they_do_when_the_script_was_started_by_the_command(tmp_path, ending, reason):
    told, _, _ = end_one(tmp_path, ending, 2, 0, by_command=True)
    assert f"n0 leaves: its script ended with {reason}" in told[0]


# --- signals ---


def test_a_closed_terminal_leaves_as_ctrl_c_does_whatever_is_printed_to_it(tmp_path):
    with scripts_in(tmp_path) as scripts:
        ours, theirs = pty.openpty()
        stays = scripts.start("n0", TRAINS + PLAIN, "1")
        stays.says("step ")
        goes = scripts.start("n1", TRAINS + PLAIN, "2", log=os.ttyname(theirs))
        os.close(theirs)
        stays.says("n1 joins")
        stays.advance()
        os.close(ours)
        assert goes.exit_code() == 0
        assert "n1 asks to leave" in stays.says("n1 leaves")
        assert "its script ended with" not in stays.text()
        stays.advance()


def test_so_it_does_when_it_prints_before_the_signal_is_handled(tmp_path):
    late = """
import fcntl, signal, termios
signal.signal(signal.SIGHUP, signal.SIG_IGN)
fcntl.ioctl(1, termios.TIOCNOTTY)  # The signal no longer comes with the terminal's end.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""
    with scripts_in(tmp_path) as scripts:
        ours, theirs = pty.openpty()
        stays = scripts.start("n0", TRAINS + PLAIN, "1")
        stays.says("step ")
        goes = scripts.start("n1", late + TRAINS + PLAIN, "2", log=os.ttyname(theirs))
        os.close(theirs)
        stays.says("n1 joins")
        os.close(ours)
        stays.advance(5)
        goes.signal(signal.SIGHUP)
        assert goes.exit_code() == 0
        assert "n1 asks to leave" in stays.says("n1 leaves")


def test_a_second_hangup_is_no_second_wish(tmp_path):
    with scripts_in(tmp_path) as scripts:
        goes = scripts.start("n0", TRAINS + PLAIN.replace("pass", "time.sleep(0.3)"), "1")
        goes.says("step ")
        goes.signal(signal.SIGHUP)
        goes.says("finishing the step")
        goes.signal(signal.SIGHUP)
        assert goes.exit_code() == 0


def test_a_script_that_ignores_hangups_as_under_nohup_trains_on(tmp_path):
    with scripts_in(tmp_path) as scripts:
        ignores = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        stays = scripts.start("n0", ignores + TRAINS + PLAIN, "1")
        stays.says("step ")
        stays.signal(signal.SIGHUP)
        stays.advance(10)


TWICE = """
from chaosnet import capture_exit_event
for turn in "first", "second":
    trainer = Trainer(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.zeros(8, 1))
    for batch in trainer.batches(data, 1, epochs=BEGIN if turn == "first" else 1):
        backward()
        trainer.update()
        print("step", trainer.step, time.monotonic(), turn, flush=True)
        time.sleep(0.01)
        if capture_exit_event():
            break
    trainer.close()
"""


def test_a_trainer_made_after_ctrl_c_ended_the_one_before_begins_anew(tmp_path):
    with scripts_in(tmp_path) as scripts:
        script = scripts.start("n0", TRAINS + TWICE.replace("BEGIN", "10**6"), "1")
        script.says("step ")
        script.signal(signal.SIGINT)
        assert script.exit_code() == 0
        assert [line[-1] for line in script.lines("step")].count("second") == 8


def test_a_second_trainer_is_refused_by_the_name_of_the_first_and_works_once_that_is_closed(tmp_path):
    twice = """
from chaosnet import ConfigError
first = Trainer(model, optimizer, cluster=Cluster(name="first"))
try:
    Trainer(model, optimizer, cluster=Cluster(name="second"))
except ConfigError as error:
    print("refused", error, flush=True)
first.close()
trainer = Trainer(model, optimizer, cluster=Cluster(name="third"))
print("goes on", step(trainer), flush=True)
trainer.close()
"""
    with scripts_in(tmp_path) as scripts:
        script = scripts.start("n0", TRAINS + twice, "1")
        assert script.exit_code() == 0
        assert "'first' is still open in this process" in script.text()
        assert "goes on True" in script.text()


SPAWNS = """
import os, sys, time, torch
from torch.utils.data import DataLoader

class Ones:
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        return torch.ones(4)

if __name__ == "__main__":
    from chaosnet import Trainer, capture_exit_event
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 2)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.01))
    for x in DataLoader(Ones(), 4, num_workers=1, multiprocessing_context="METHOD"):
        model(x).sum().backward()
        trainer.update()
        print("step", trainer.step, time.monotonic(), flush=True)
        time.sleep(0.05)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["ctrl-c", "hangup"])
def test_what_the_terminal_sends_to_all_finishes_the_step_although_workers_load_it(tmp_path, method, number):
    with scripts_in(tmp_path) as scripts:
        script = scripts.start("n0", SPAWNS.replace("METHOD", method), by_command=True)
        script.says("step ")
        script.signal(number, group=True)
        assert script.exit_code() == 0, script.text()
        assert script.text().count("finishing the step") == script.text().count("n0 left after step") == 1
        assert "Traceback" not in script.text()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_that_runs_the_script_anew_is_no_node_and_says_what_is_missing(tmp_path, method):
    text = SPAWNS.replace("METHOD", method).replace('__name__ == "__main__"', "True")
    with scripts_in(tmp_path) as scripts:
        script = scripts.start("n0", text, by_command=True)
        assert script.exit_code() == 1
        assert "Trainer: a process that the script has started" in script.text()
        assert "cannot listen" not in script.text()


# --- before the start, and without a node ---


def run(folder, script, *options, args=()):
    """`chaosnet run`. Returns: exit code, what it says, and whether torch was imported."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-X", "importtime", "-m", "chaosnet", "run", *options, "train.py", *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    return done.returncode, said, "torch" in done.stderr.replace("\n".join(said), "")


def test_a_port_in_use_is_told_before_torch_loads(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        code, said, torch_loaded = run(tmp_path, "import torch\n", "--listen", place)
    assert code == 1
    why = "Address already in use (expected an address of this machine with a free port; port 0 takes any)"
    assert said == [f"error: --listen: cannot listen on {place!r}: {why}"]
    assert not torch_loaded


@pytest.mark.parametrize("option", ["--key", "--allowed-keys"])
def test_a_bad_key_file_is_told_before_torch_loads(tmp_path, option):
    (tmp_path / "bad").write_text("no key\n")
    (tmp_path / "bad").chmod(0o600)
    code, said, torch_loaded = run(tmp_path, "import torch\n", option, str(tmp_path / "bad"))
    assert code == 2
    assert len(said) == 1 and str(tmp_path / "bad") in said[0]
    assert not torch_loaded


def test_a_folder_for_checkpoints_that_cannot_be_written_is_told_before_torch_loads(tmp_path):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "checkpoints"
    code, said, torch_loaded = run(tmp_path, "import torch\n", "--checkpoint-dir", str(place))
    assert code == 2
    assert len(said) == 1 and said[0].startswith(f"error: directory: {str(place)!r} cannot be written: ")
    assert not torch_loaded


@pytest.mark.parametrize(("script", "code"), [("print(1)", 0), ("raise SystemExit(7)", 7)])
def test_a_script_without_a_trainer_is_told_so_and_keeps_its_exit_code(tmp_path, script, code):
    found, said, _ = run(tmp_path, script)
    assert found == code
    assert said == [
        "[chaosnet] train.py made no Trainer in this process before it ended: it was no node of a cluster"
    ]


@pytest.mark.slow
def test_a_wrong_call_in_a_script_is_told_with_its_line(tmp_path):
    script = (
        "from chaosnet import Trainer\nimport torch\nmodel = torch.nn.Linear(2, 2)\n"
        "trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "def train():\n    for batch in trainer.batches([1, 2, 3], batch_size=0):\n        pass\ntrain()\n"
    )
    code, said, _ = run(tmp_path, script, "--listen", "127.0.0.1:0")
    assert code == 2
    assert said[-2:] == [
        "error: batch_size: 0 (expected a whole number from 1)",
        "  in train.py, line 6: for batch in trainer.batches([1, 2, 3], batch_size=0):",
    ]


def test_an_option_behind_the_script_that_would_have_found_the_others_is_told(tmp_path):
    script = "import os, sys\nprint(sys.argv, file=sys.stderr)\nos._exit(0)"
    code, said, _ = run(
        tmp_path, script, "--listen", "127.0.0.1:0", args=["--join=a:1", "--listen", "b:1", "--lr"]
    )
    assert code == 0
    assert said == [
        "[chaosnet] --join stands behind train.py, so the script gets it and chaosnet does not "
        "(options of chaosnet come first: chaosnet run --join ... train.py)",
        "['train.py', '--join=a:1', '--listen', 'b:1', '--lr']",
    ]


def test_ctrl_c_before_there_is_a_trainer_is_told_as_no_more_than_that(tmp_path):
    code, said, _ = run(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGINT)")
    assert code == 130
    assert [line for line in said if line] == ["error: interrupted"]


# --- the last checkpoint ---

SAVES = """
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.zeros(30, 1))
trainer = Trainer(model, optimizer, cluster=Cluster(chunk_bytes=4096))
print("begins", trainer.step, trainer.state_hash(), flush=True)
for batch in trainer.batches(data, 2, epochs=int(sys.argv[2])):
    torch.rand(1)
    backward()
    trainer.update()
    print("step", trainer.step, time.monotonic(), trainer.state_hash(), flush=True)
    time.sleep(float(sys.argv[3]))
trainer.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending", ["script ends", "ctrl-c everywhere", "one after the other", "sigterm everywhere"]
)
@pytest.mark.parametrize("count", [1, 3])
def test_the_last_state_is_on_disk_however_all_have_left(tmp_path, ending, count):
    epochs, pause_s = ("8", "0.02") if ending == "script ends" else ("100000", "0.02")
    with scripts_in(
        tmp_path, CHAOSNET_CHECKPOINT_DIR=str(tmp_path / "all"), CHAOSNET_EVERY="1000"
    ) as scripts:
        for n in range(count):
            scripts.start(f"n{n}", TRAINS + SAVES, "1", epochs, pause_s)
            scripts.started[-1].says("begins ")
        nodes = list(scripts.started)
        if ending != "script ends":
            nodes[-1].advance()
        for node in nodes if ending != "script ends" else ():
            node.signal(signal.SIGTERM if "sigterm" in ending else signal.SIGINT)
            if ending == "one after the other":
                assert node.exit_code() == 0
        assert [node.exit_code() for node in nodes] == count * [0]
        last = max((line for node in nodes for line in node.lines("step")), key=lambda line: int(line[0]))
        again = scripts.start(
            "again",
            TRAINS + SAVES,
            "1",
            "100000",
            pause_s,
            join=False,
            CHAOSNET_RESUME="1",
            CHAOSNET_NAME="n0",
        )
        again.says("begins ")
        assert again.lines("begins") == [[last[0], last[2]]], scripts.story()


def test_a_main_thread_that_ends_beside_a_daemon_that_trains_leaves_and_the_other_goes_on(tmp_path):
    text = """
import threading, time, torch, sys
from torch import nn
from chaosnet import Cluster, Trainer
torch.set_num_threads(1)
model = nn.Linear(4, 1)
def work():
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.01))
    while True:
        model(torch.randn(8, 4)).pow(2).mean().backward()
        trainer.update()
        print("step", trainer.step, time.monotonic(), flush=True)
        time.sleep(0.01)
threading.Thread(target=work, daemon=True).start()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
""".replace("import threading", "import os, threading")
    with scripts_in(tmp_path) as scripts:
        first = scripts.start("a", text, "end")
        other = scripts.start("b", text, "never")
        other.advance(5)
        (tmp_path / "end").touch()
        assert first.exit_code() == 0, scripts.story()
        other.advance(20)
        assert "left after step" in first.text() and "waiting" not in other.text(), scripts.story()
