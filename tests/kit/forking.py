"""The process behind kit/warm.py: it imports the modules that it is given, and then forks for each line that it reads.

    python -P tests/kit/forking.py numpy

It imports next to nothing besides, so that a program can look at what it imports itself.
"""

import os
import sys


def fork_for_each_line():
    """Forks, and prints the status with which the fork ended; in a fork it returns the line, in the end None."""
    for line in sys.stdin:
        asked = eval(line)  # json would be a module that is imported
        pid = os.fork()
        if pid == 0:
            return asked
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return None


def take_over(asked):
    """Gives this process the streams, the folder and the environment of the program."""
    making = os.O_WRONLY | os.O_CREAT
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, asked["out"], making), (2, asked["err"], making)):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])


def run(words):
    """Runs -c CODE, -m MODULE or FILE, as the interpreter does; before them there may be -W ACTION."""
    import warnings

    sys.orig_argv = [sys.executable, *words]  # kit/at.py reads the text of -c there
    while words[0] == "-W":
        warnings.simplefilter(words[1])
        words = words[2:]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = type(sys)("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
        return
    import runpy

    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    import gc

    for name in sys.argv[1:]:
        __import__(name)
    gc.freeze()  # forks share this memory as long as they do not write it
    asked = fork_for_each_line()
    if asked is not None:
        take_over(asked)
        run(asked["words"])
