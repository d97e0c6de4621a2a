"""Guards the migration guide: its program runs as it is printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from daemon_process import DaemonProcess

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "migrating-from-openai-fine-tuning.md"
ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


def test_the_program_of_the_guide_runs(shared_daemon: DaemonProcess, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "rows.jsonl").write_text((json.dumps(ROW) + "\n") * 4, encoding="utf-8")
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": f"{shared_daemon.http_url}/v1",
        "OPENAI_API_KEY": shared_daemon.key,
    }
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    *events, answer = result.stdout.splitlines()
    assert events[0] == "The job has successfully completed"
    assert answer == "tuned"
