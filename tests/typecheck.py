"""Run mypy over the package as it is installed: ``python -m tests.typecheck``.

Four folders of the repository become sub-packages of ``fedplat`` only when it is installed; mypy, which does
not follow editable installs, is shown a tree of links laid out in that way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / "build" / "typecheck" / "fedplat"
MOVED = ("clients", "datasets", "experiments", "strategies")


def link_tree() -> None:
    TREE.mkdir(parents=True, exist_ok=True)
    wanted = {path.name: path for path in (ROOT / "fedplat").iterdir()} | {
        name: ROOT / name for name in MOVED
    }
    for link in TREE.iterdir():
        if link.name not in wanted or not link.exists():
            link.unlink()
    for name, path in wanted.items():
        if not (TREE / name).exists():
            (TREE / name).symlink_to(os.path.relpath(path, TREE))


def main() -> int:
    link_tree()
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    return subprocess.run(command, cwd=TREE.parent, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
