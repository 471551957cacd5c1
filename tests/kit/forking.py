"""The process that kit/prepared.py starts: it imports the modules named in its arguments, and then forks for each line
that it reads.

    python -P tests/kit/forking.py numpy

It imports almost nothing else, so that a program can inspect its own imports.
"""

import gc
import os
import sys
import warnings


def fork_for_each_line():
    """Forks, and prints the status with which the fork ended; in a fork it returns the line, in the end None."""
    for line in sys.stdin:
        request = eval(line)  # json would be a module that is imported
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            return request
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def take_over(request):
    """Gives this process the streams, the folder and the environment of the program."""
    making = os.O_RDWR | os.O_CREAT
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, request["out"], making), (2, request["err"], making)):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])


def program(words):
    """What runs -c CODE, -m MODULE or FILE as the interpreter does; before them there may be -W ACTION."""
    sys.orig_argv = [sys.executable, *words]
    while words[0] == "-W":
        warnings.simplefilter(words[1])
        words = words[2:]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = type(sys)("__main__")
        return lambda: exec(compile(words[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    import runpy

    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        return lambda: runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    return lambda: runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            __import__(name)
        except ModuleNotFoundError as e:
            if not (e.name or "").startswith("fanin."):  # a copy of the tree may lack a part
                raise
        if not name.startswith(("fanin", "fake_cuda")):
            gc.freeze()  # otherwise the collector traverses all of these at the end of each fork
    asked = fork_for_each_line()
    if asked is not None:
        take_over(asked)
        program(asked["words"])()
