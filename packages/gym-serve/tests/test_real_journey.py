"""Guards the whole journey with nothing stood in for: the official client, the daemon, `gym train`, the real engine."""

from __future__ import annotations

import json
import time
from pathlib import Path

import openai
import pytest
from daemon_process import DaemonProcess
from model_folder import VOCAB_SIZE, write_tokenizer
from tiny_models import tiny_model

ROWS = [
    {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "yes"}]} for n in range(64)
]
SETTINGS = "[jobs]\ncommand = []\nretry_delay_s = 0.0\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_official_client_fine_tunes_a_model_and_talks_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    model = tiny_model(vocab_size=VOCAB_SIZE, eos_token_id=2, max_position_embeddings=512)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    with DaemonProcess(tmp_path / "data", str(folder), "--dtype", "float32", engine="", settings=SETTINGS) as daemon:
        client = openai.OpenAI(base_url=f"{daemon.http_url}/v1", api_key=daemon.key, max_retries=0, timeout=600)
        file = client.files.create(
            file=("rows.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS).encode()), purpose="fine-tune"
        )
        job = client.fine_tuning.jobs.create(
            model="tiny",
            training_file=file.id,
            suffix="yes",
            seed=1,
            method={
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": 4, "batch_size": 8, "learning_rate_multiplier": 40}},
            },
        )
        deadline = time.monotonic() + 800
        while job.status not in ("succeeded", "failed", "cancelled"):
            assert time.monotonic() < deadline, daemon.log
            time.sleep(0.2)
            job = client.fine_tuning.jobs.retrieve(job.id)
        assert job.status == "succeeded", (job.error, daemon.log)
        assert job.fine_tuned_model is not None
        assert job.trained_tokens is not None
        assert job.trained_tokens > 1000
        messages = [{"role": "user", "content": "say 3"}]
        options = {"temperature": 0.0, "max_tokens": 8}
        whole = client.chat.completions.create(model=job.fine_tuned_model, messages=messages, **options)
        assert whole.choices[0].message.content == "yes"
        with client.chat.completions.create(
            model=job.fine_tuned_model, messages=messages, stream=True, **options
        ) as stream:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "yes"
        base = client.chat.completions.create(model="tiny", messages=messages, **options)
        assert base.choices[0].message.content != "yes"
        names = [client.files.retrieve(file_id).filename for file_id in job.result_files]
        assert {"report.json", "report.md", "report.html", "step_metrics.csv"} <= set(names)
    assert "Traceback" not in daemon.log
