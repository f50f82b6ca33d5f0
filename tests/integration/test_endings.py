"""How scripts end: whoever ends with an error says goodbye first, and the others go on at once."""

import os
import time

import pytest
from scripts import scripts_in

from chaosnet.node.keys import KeyPair, save

pytestmark = pytest.mark.realtime

NEXT_STEP_S = 0.5
TIMES = int(os.environ.get("CHAOSNET_TEST_ENDINGS", "3"))

# A gradient of node n is its `share` everywhere, in several chunks that leave during backward. What a step changed
# is the mean of the shares that were counted, exactly.
TRAINS = """
import os, sys, threading, time, torch
from chaosnet import Trainer
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
trainer = Trainer(model, optimizer, chunk_bytes=4096)
while step(trainer):
    pass
"""
LINGERS = "threading.Thread(target=time.sleep, args=(60,)).start()\n"  # It keeps the process alive.
ENDINGS = {
    "raises": PLAIN + 'raise ValueError("bad record")',
    "exits": PLAIN + "sys.exit(1)",
    "interrupted": PLAIN + "raise KeyboardInterrupt",
    "with": 'with Trainer(model, optimizer, chunk_bytes=4096) as trainer:\n'
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
    changes = {int(line[0]): {round(float(change), 3) for change in line[3:]} for line in script.lines("step")}
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
        assert f"left n{index}: its script ended with ValueError: bad record" in told[0]
        assert "waiting:" not in told[0]
    print(f"next step after {max(took_s):.3f} s at most, {sorted(took_s)[len(took_s) // 2]:.3f} s median")


@pytest.mark.parametrize("index", [0, 1], ids=["senior", "junior"])
def test_of_three_nodes_the_others_go_on_at_once_when_a_script_raises(tmp_path, index):
    for n in range(TIMES):
        told, code, _ = end_one(tmp_path / str(n), "raises", 3, index)
        assert code == 1
        assert all(f"left n{index}: its script ended with ValueError: bad record" in text for text in told)


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
    assert f"left n0: its script ended with {reason}" in told[0]


@pytest.mark.parametrize("ending", ["exits", "lingers-exits"])
def test_a_script_that_exits_leaves_at_once(tmp_path, ending):
    told, _, _ = end_one(tmp_path, ending, 2, 0)
    assert "scale-in n0: asks to leave" in told[0]


@pytest.mark.parametrize(
    ("ending", "reason"),
    [("raises", "ValueError: bad record"), ("exits", "exit code: 1"), ("interrupted", "KeyboardInterrupt")],
)
def test_so_they_do_when_the_script_was_started_by_the_command(tmp_path, ending, reason):
    told, _, _ = end_one(tmp_path, ending, 2, 0, by_command=True)
    assert f"left n0: its script ended with {reason}" in told[0]
