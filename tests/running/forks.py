"""Jobs under ``fp8doctor run`` in forks of a process with their imports done, which take a new process six
seconds. All is fp8doctor's own but one thing: the process becomes the script without `os.execve`."""

import json
import textwrap
from pathlib import Path

from tests.programs import printed

IMPORTED = """
import accelerate.commands.launch
import torch
import torch.distributed.fsdp
import torch.distributed.run
import torch._functorch.aot_autograd
import torch._inductor.codegen.triton
import torchao.float8
import peft
import transformers.models.llama
from transformers import Trainer
from fp8doctor.running.script_messages import WatchOptions
"""
"""What jobs and launchers import."""

BECOME = """
import atexit
import gc
import json
import os
import runpy
import sys
import threading
from fp8doctor.__main__ import main
from fp8doctor.running.observer import ScriptObserver
gc.freeze()  # what was imported is no model

def become(interpreter, command, environment):
    os.environ.clear()
    os.environ.update(environment)
    startup = environment["PYTHONPATH"].partition(os.pathsep)[0]
    sys.argv = command[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    status = 0
    try:
        runpy.run_path(os.path.join(startup, "sitecustomize.py"), run_name="sitecustomize")
        sys.meta_path.pop(0).watch()  # torch has been imported
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

os.execve = become
"""
"""A process that is to become the script runs it, and ends as the interpreter does."""

RUN = """
folder, *sys.argv = sys.argv[1:]
os.chdir(folder)
stderr, end = os.pipe()
process = os.fork()
if not process:
    os.dup2(end, 2)
    os.dup2(os.open("stdout", os.O_WRONLY | os.O_CREAT), 1)
    for each in (stderr, end):
        os.close(each)
    try:
        main()
    except SystemExit as ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code)
os.close(end)
with open(stderr) as said:
    told = said.read()
code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
print(json.dumps([code, open("stdout").read(), told]))
"""


def run(options: list[str], text: str, folder: Path, **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``fp8doctor run``, with the script ``train.py`` of this text."""
    (folder / "train.py").write_text(textwrap.dedent(text))
    command = ["fp8doctor", "run", *options, "train.py"]
    said = printed(IMPORTED + BECOME + RUN, str(folder), *command, **variables)
    code, out, err = json.loads(said.splitlines()[-1])
    return code, out, err
