"""Check `proto/`: names by buf's STANDARD rules, its formatting, and that no change breaks an older client.

    uv run python tools/check_protos.py             # exit 1 and what is wrong
    uv run python tools/check_protos.py --release   # keep the schema of today as the one that must not break

The schema that must not break is `proto/released.binpb`, a descriptor set. buf comes in an environment of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RELEASED = "proto/released.binpb"
BUF = ("uv", "run", "--isolated", "--no-project", "--quiet", "--with", "buf-bin==1.75.0", "buf")


def buf(*arguments: str) -> int:
    """Run buf in the repository; returns its exit code."""
    return subprocess.run([*BUF, *arguments], cwd=REPOSITORY, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Check proto/ with buf.")
    parser.add_argument("--release", action="store_true", help="keep today's schema as the one that must not break")
    if parser.parse_args().release:
        return buf("build", "--as-file-descriptor-set", "--exclude-source-info", "-o", RELEASED)
    checks = [
        buf("lint"),
        buf("format", "--diff", "--exit-code"),
        buf("breaking", "--against", RELEASED),
    ]
    return 1 if any(checks) else 0


if __name__ == "__main__":
    sys.exit(main())
