"""Compiles an extension against fanin.h, as setuptools would with include_dirs=[fanin.get_include()]."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import fanin

LINK = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared", "-fPIC"]
INCLUDE = [f"-I{sysconfig.get_path('include')}", f"-I{fanin.get_include()}"]


def needs(program: str) -> str:
    """The program's path; ends the example where it is not installed."""
    path = shutil.which(program)
    if path is None:
        print(f"this example needs {program}, which is not installed")
        sys.exit(0)
    return path


def load(name: str, library: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def compiled(source: str, *flags: str) -> ModuleType:
    """The extension of a file beside this one; its module is named as the file."""
    path = Path(source) if os.path.isabs(source) else Path(__file__).with_name(source)
    variable, usual = ("CXX", "c++") if path.suffix == ".cpp" else ("CC", "cc")
    command = os.environ.get(variable, usual).split()
    needs(command[0])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, path.stem + str(sysconfig.get_config_var("EXT_SUFFIX")))
        subprocess.run([*command, "-O2", *LINK, *flags, *INCLUDE, str(path), "-o", str(out)], check=True)
        return load(path.stem, out)
