"""exgen can be installed, copied beside a script, or vendored in a package, and each file can be copied alone."""

import ast
import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import Saved

ROOT = Path(__file__).parent.parent
MODULES = ("exgen", "cache", "config", "export", "prefill", "program", "strategies")
DEPENDENCIES = {"torch", "transformers", "einops"}
SCRIPT = """
import json, sys
import torch
from {package} import generate

ids = generate(sys.argv[1], torch.tensor(json.loads(sys.argv[2])), num_beams=3, max_new_tokens=5)
file = sys.modules[generate.__module__].__file__
print(json.dumps({{"ids": ids[0].tolist(), "file": file, "modules": list(sys.modules)}}))
"""


def run_script(python: Path | str, script: Path, package: str, saved: Saved) -> tuple[Path, set[str]]:
    """Generate in a new process; which file `generate` came from, and what was imported."""
    script.write_text(SCRIPT.format(package=package))
    command = [python, script, saved.file, json.dumps(saved.prompt.tolist())]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["ids"] == saved.beams
    return Path(answer["file"]), set(answer["modules"])


def copy_flat(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODULES:
        shutil.copy(ROOT / f"{name}.py", folder)


def test_pip_install_gives_one_package(tmp_path: Path, saved: Saved) -> None:
    # A new environment that sees this one's torch and transformers, so that pip need not load them again.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    found = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    site = Path(found.strip())
    (site / "outer.pth").write_text(sysconfig.get_path("purelib"))
    install: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-index",
        "--no-build-isolation",
    ]
    done = subprocess.run([*install, ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    landed = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert landed == {"exgen", "outer.pth"}
    files = {path.name for path in (site / "exgen").iterdir()} - {"__pycache__"}
    assert files == {"__init__.py", "py.typed", *(f"{name}.py" for name in MODULES[1:])}

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    file, modules = run_script(python, elsewhere / "script.py", "exgen", saved)
    assert file == site / "exgen" / "__init__.py"
    assert not modules & set(MODULES[1:])


def test_flat_files_work_beside_a_script(tmp_path: Path, saved: Saved) -> None:
    copy_flat(tmp_path)
    file, modules = run_script(sys.executable, tmp_path / "script.py", "exgen", saved)
    assert file == tmp_path / "exgen.py"
    assert modules >= set(MODULES)


def test_files_work_vendored_in_a_package(tmp_path: Path, saved: Saved) -> None:
    copy_flat(tmp_path / "mypkg" / "vendored")
    (tmp_path / "mypkg" / "__init__.py").touch()
    (tmp_path / "mypkg" / "vendored" / "__init__.py").touch()
    file, modules = run_script(sys.executable, tmp_path / "script.py", "mypkg.vendored.exgen", saved)
    assert file == tmp_path / "mypkg" / "vendored" / "exgen.py"
    assert not modules & set(MODULES)


def imports(module: str) -> set[str]:
    """The top-level names that a file imports anywhere; relative imports as `.name`."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            names |= {f".{node.module}"} if node.module else {f".{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name if name.startswith(".") else name.split(".")[0] for name in names}


@pytest.mark.parametrize("module", MODULES[1:])
def test_a_sibling_imports_only_the_three_packages(module: str) -> None:
    # a .pte needs ExecuTorch's runtime, which is imported where one is opened
    optional = {"executorch"} if module == "program" else set()
    assert imports(module) - sys.stdlib_module_names <= DEPENDENCIES | optional


def test_exgen_imports_its_siblings_flat_and_packaged() -> None:
    siblings = imports("exgen") - sys.stdlib_module_names - DEPENDENCIES
    assert siblings == {*MODULES[1:], *(f".{name}" for name in MODULES[1:])}


def test_every_flat_file_is_in_the_wheel() -> None:
    listed = (ROOT / "pyproject.toml").read_text()
    flat = {path.stem for path in ROOT.glob("*.py")} - {"demo"} - {path.stem for path in ROOT.glob("test_*.py")}
    assert flat == set(MODULES)
    assert all(f'"{name}.py" = "exgen/{"__init__" if name == "exgen" else name}.py"' in listed for name in MODULES)
