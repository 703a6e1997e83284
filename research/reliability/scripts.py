"""Forty training scripts under Python and under ``fp8doctor run``: the same stdout, exit code and files.

Each keeps its weights, and every file that it leaves is compared. Its lines on stderr are there too.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from fp8doctor import load_report
from research.reliability.count import Count

ROOT, LONGEST_S = Path(__file__).resolve().parents[2], 600

COMMON = """
import os, random, sys
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
random.seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(32, 4)
    def forward(self, x): return self.head(self.dropout(self.blocks(x)))
def data(many): return torch.utils.data.TensorDataset(torch.randn(many, 32), torch.randint(0, 4, (many,)))
def loss_of(model, x=None, y=None):
    x, y = (torch.randn(16, 32), torch.randint(0, 4, (16,))) if x is None else (x, y)
    return nn.functional.cross_entropy(model(x).float(), y)
def adam(model): return torch.optim.AdamW(model.parameters(), lr=1e-3)
def steps(model, optimizer, batches=22 * [()]):
    for step, pair in enumerate(batches):
        loss = loss_of(model, *pair)
        loss.backward()
        print(step, loss.item(), optimizer.step(), flush=True)
        optimizer.zero_grad()
        yield step
def keep(model, name="weights.pt"): torch.save({**model.state_dict()}, name)
"""
"""What every script begins with."""

WORKERS = """
def seeded(at): random.seed(at)
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 176
    def __getitem__(self, at): return torch.full((32,), random.random()), at % 4
if __name__ == "__main__":
    model = Net()
    loader = torch.utils.data.DataLoader(Rows(), 8, shuffle=True, num_workers=2, worker_init_fn=seeded, {})
    print(len(list(steps(model, adam(model), loader))), torch.rand(1))
    keep(model)"""

PROCESSES = """
import multiprocessing
def work(at):
    torch.manual_seed(at)
    model = Net()
    for _ in steps(model, adam(model)): pass
    keep(model, f"{{at}}.pt")
if __name__ == "__main__":
    with multiprocessing.get_context("{}").Pool(1) as pool: print(pool.map(work, range(2)))
    work(3)"""


def loop(
    begin: str = "", each: str = "pass", after: str = "keep(model)", optimizer: str = "adam(model)"
) -> str:
    """The plain loop over a model, with deeds before, in and after it."""
    return f"model = Net()\n{begin}\nfor step in steps(model, {optimizer}):\n    {each}\n{after}"


SCRIPTS = {
    "plain": loop(),
    "arguments": loop("print(sys.argv)"),
    "a module": loop("print(sys.argv, __spec__.name)"),
    "from stdin": loop("print(__file__, sys.argv)"),
    "reads stdin": loop("print(input())", "print(repr(sys.stdin.readline()))"),
    "options of Python": loop("import warnings\nprint(sys.flags, warnings.filters)"),
    "exec": f"text = {loop()!r}\nexec(compile(text, 'inner', 'exec'), vars(sys.modules['__main__']))",
    "runpy": "import runpy\nrunpy.run_path('other.py', run_name='__main__')",
    "pickles what is its own": loop(
        "class Mine(Net): pass\nmodel = Mine()",
        after="torch.save(model, 'all.pt')\nprint(type(torch.load('all.pt', weights_only=False)) is Mine)",
    ),
    "forked processes": PROCESSES.format("fork"),
    "spawned processes": PROCESSES.format("spawn"),
    "forked workers": WORKERS.format(""),
    "spawned workers": WORKERS.format("multiprocessing_context='spawn', persistent_workers=True"),
    "Trainer": """
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
class Told(TrainerCallback):
    def on_step_end(self, arguments, state, control, **more): print("step", state.global_step)
class WithLoss(Net):
    def forward(self, x, labels): return {"loss": loss_of(super().forward, x, labels), "logits": x}
rows = [{"x": torch.randn(32), "labels": at % 4} for at in range(200)]
model = WithLoss()
every = {"eval_steps": 7, "eval_strategy": "steps", "save_strategy": "no", "max_steps": 22}
quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 50}
arguments = TrainingArguments("out", gradient_accumulation_steps=2, bf16=True, seed=1, **every, **quiet)
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:20], callbacks=[Told()])
trainer.remove_callback(PrinterCallback)  # which prints how long it took
print(trainer.train().training_loss)
keep(model)""",
    "Accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
bare = Net()
model, optimizer, loader = accelerator.prepare(bare, adam(bare), torch.utils.data.DataLoader(data(400), 8))
for x, y in loader:
    with accelerator.accumulate(model):
        loss = loss_of(model, x, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(loss.item())
keep(bare)""",
    "Lightning": """
import lightning
class Module(lightning.LightningModule):
    def __init__(self): super().__init__(); self.net = Net()
    def training_step(self, pair, at): return loss_of(self.net, *pair)
    def configure_optimizers(self): return adam(self)
quiet = {f"enable_{each}": False for each in ("checkpointing", "progress_bar", "model_summary")}
trainer, model = lightning.Trainer(max_steps=22, accelerator="cpu", logger=False, **quiet), Module()
trainer.fit(model, torch.utils.data.DataLoader(data(200), 8, shuffle=True))
print(trainer.global_step)
keep(model)""",
    "torchrun": """
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
if dist.get_rank(): sys.stdout = open(os.devnull, "w")
model = nn.parallel.DistributedDataParallel(Net())
for step in steps(model, adam(model)): pass
keep(model.module, f"{dist.get_rank()}.pt")
dist.destroy_process_group()""",
    "exits with 3": loop(after="keep(model)\nsys.exit(3)"),
    "exits with words in its window": loop("", "if step == 9: keep(model); sys.exit('enough')"),
    "raises in its window": loop("", "if step == 9: keep(model); [][step]"),
    "catches what a forward raises": """
class Odd(Net):
    def forward(self, x): return super().forward(x[:, : 31 + (at % 9 > 0)])
model = Odd()
optimizer = adam(model)
for at in range(25):
    try: print(len(list(steps(model, optimizer, [()]))))
    except RuntimeError as error: print("caught", error)
keep(model)""",
    "is interrupted": loop("import signal", "if step == 9: keep(model); signal.raise_signal(signal.SIGINT)"),
    "is preempted": loop(
        "import signal\ndef handle(number, frame):\n    keep(model, f'{number}.pt')\n"
        "    if number == signal.SIGTERM: print('end'); sys.exit(17)\n"
        "for number in (signal.SIGTERM, signal.SIGUSR1): signal.signal(number, handle)",
        "if step in (8, 15): os.kill(os.getpid(), signal.SIGUSR1 if step == 8 else signal.SIGTERM)",
    ),
    "leaves without an end": loop(after="keep(model)\nos._exit(9)"),
    "saves at its exit": loop(
        "import atexit\natexit.register(print, 'bye')\natexit.register(keep, model)", after=""
    ),
    "prints in pieces": loop(
        "", "print(step, end=' '); os.write(1, b'!'); sys.stdout.buffer.write(b'\\xff')"
    ),
    "looks around": loop(
        "import hashlib, logging, warnings\nlogging.basicConfig(stream=sys.stdout, level=logging.INFO)",
        "logging.info('%s', step); warnings.warn(f'step {step}')",
        "print(sys.path, sorted(os.environ.items()), sys.getrecursionlimit(), torch.get_num_threads())\n"
        "print(sorted(vars(sys.modules['__main__'])), logging.root.handlers, sys.stdin.isatty())\n"
        "drawn = random.getstate(), torch.get_rng_state().tolist()\n"
        "print(hashlib.sha256(repr(drawn).encode()).hexdigest())\nkeep(model)",
    ),
    "says what is asked of it": loop("""class Says(Net):
    @property
    def weight(self): print("weight"); return 1
    def __getattr__(self, name): print(name) if name[0] in "qfw" else 0; return super().__getattr__(name)
    def __del__(self): print("gone", flush=True)
    def __repr__(self): print("shown"); return "Says()"
    def __deepcopy__(self, memo): print("copied"); raise TypeError
    def __reduce_ex__(self, protocol): print("pickled"); raise TypeError
    def named_modules(self, *more, **named): print("modules"); return super().named_modules(*more, **named)
model = Says()"""),
    "hooks": loop(
        """from torch.optim.optimizer import register_optimizer_step_post_hook
seen = []
for each in model.modules():
    each.register_forward_hook(lambda *_: seen.append(1))
    each.register_full_backward_hook(lambda *_: seen.append(2))
nn.modules.module.register_module_forward_pre_hook(lambda *_: seen.append(3))
register_optimizer_step_post_hook(lambda *_: seen.append(4))
for each in model.parameters(): each.register_hook(lambda gradient: gradient * 0.5)""",
        after="print(len(seen), hash(tuple(seen)))\nkeep(model)",
    ),
    "compiled": loop(
        "model.compile(backend='aot_eager')",
        after="print(torch._dynamo.utils.counters['frames'])\nkeep(model)",
    ),
    "compiled blocks": loop("for each in model.blocks: each.compile(backend='eager')"),
    "two optimizers": """
made, judge = nn.Linear(32, 32), Net()
turns = zip(*(steps(nn.Sequential(made, judge), adam(each)) for each in (made, judge)))
print(len(list(turns)))
keep(nn.ModuleList([made, judge]))""",
    "LBFGS": """
model, (x, y) = Net().eval(), data(16).tensors
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
def closure(): optimizer.zero_grad(); loss = loss_of(model, x, y); loss.backward(); return loss
for _ in range(22): print(optimizer.step(closure))
keep(model)""",
    "accumulates, clips, averages": """
model = Net()
mean, optimizer = torch.optim.swa_utils.AveragedModel(model), adam(model)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
for step in range(60):
    with torch.autocast("cpu", torch.bfloat16): (loss_of(model) / 3).backward()
    if step % 3 == 2:
        print(nn.utils.clip_grad_norm_(model.parameters(), 0.1), schedule.get_last_lr())
        optimizer.step(); schedule.step(); optimizer.zero_grad(); mean.update_parameters(model)
torch.save([model.state_dict(), mean.state_dict(), optimizer.state_dict()], "weights.pt")""",
    "FP8, emulated": loop("""from torchao.float8 import Float8LinearConfig, convert_to_float8_training
model = convert_to_float8_training(Net().bfloat16(), config=Float8LinearConfig(emulate=True))
model.register_forward_pre_hook(lambda _, given: (given[0].bfloat16(),))"""),
    "checkpointing": loop("""from torch.utils.checkpoint import checkpoint
torch.use_deterministic_algorithms(True)
model.forward = lambda x: model.head(checkpoint(model.blocks, model.dropout(x), use_reentrant=False))"""),
    "a profiler of its own": loop(
        "profiler = torch.profiler.profile()\nprofiler.start()",
        after="profiler.stop()\nprint(sum('addmm' in each.name for each in profiler.events()))\nkeep(model)",
    ),
    "trains in a thread": """
import threading
def train():
    model = Net()
    for _ in steps(model, adam(model)): pass
    keep(model)
thread = threading.Thread(target=train)
thread.start()
thread.join()
print(len(threading.enumerate()))""",
    "a sweep of models": """
for lr in (1e-2, 1e-3, 1e-4):
    model = Net()
    print(lr, len(list(steps(model, torch.optim.SGD(model.parameters(), lr), 9 * [()]))))
    keep(model, f"{lr}.pt")""",
    "its own optimizer": loop(
        """class Own(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for each in self.param_groups[0]["params"]: each.sub_(each.grad, alpha=0.01)
        return "mine" """,
        optimizer="Own(model.parameters(), {})",
    ),
}

COMMANDS = {
    "arguments": "RUN train.py --lr 1 -o a=b -- --fail-on run",
    "a module": "RUN -m train --steps 3",
    "from stdin": "RUN - a",
    "options of Python": "-W error::UserWarning -O -u -X dev RUN train.py",
    "torchrun": "-m torch.distributed.run --standalone --nproc-per-node 2 RUN train.py",
}
"""What follows ``python``."""

RUN = "-m fp8doctor run --save ../report.json"


def scripts(names: list[str], folder: Path) -> Count:
    """Run each of them twice, in a folder of one name."""
    count = Count("a training script, under Python and under `run`")
    for name in names:
        with count.attempt(name) as why:
            plain, watched = (ended(name, folder / "job", run) for run in ("", RUN))
            steps = load_report(folder / "report.json").facts.get("observed.steps_ms", ())
            why += [] if steps else ["no step was watched"]
            lines = iter(watched.pop("stderr"))
            why += [f"not on stderr: {line!r}" for line in plain.pop("stderr") if line not in lines]
            differ = [what for what in {**plain, **watched} if watched.get(what) != plain.get(what)]
            why += [f"{what}: {watched.get(what)!r}, not {plain.get(what)!r}" for what in differ]
    return count


def ended(name: str, folder: Path, run: str) -> dict[str, Any]:
    """How a script ends, and each file that it leaves."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file, text in (("train.py", SCRIPTS[name]), ("other.py", loop())):
        (folder / file).write_text(f"{COMMON}\n{text}\n")
    command = [sys.executable, *COMMANDS.get(name, "RUN train.py").replace("RUN", run).split()]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder.parent)}
    with (folder / "train.py").open() as given:
        done = subprocess.run(
            command,
            cwd=folder,
            env=variables,
            stdin=given,
            capture_output=True,
            timeout=LONGEST_S,
            check=False,
        )
    files = [each for each in folder.rglob("*") if each.is_file() and each.suffix != ".pyc"]
    kept = {str(each.relative_to(folder)): hashlib.blake2b(each.read_bytes()).hexdigest() for each in files}
    lines = re.sub(r"\d+", "#", done.stderr.decode(errors="replace")).splitlines()
    return {"stdout": done.stdout, "exit code": done.returncode, "stderr": lines, **kept}
