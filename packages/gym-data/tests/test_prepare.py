"""Guards preparation: what is trained, what is dropped and counted, what is held out, and what the cache depends on."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gym_data import Prepared, Tokenizer, prepare
from gym_data.packing import micro_batches, steps
from gym_data.store import TokenStore
from gym_sdk.errors import DataError
from gym_sdk.spec.data import DataSource, DataSpec, EvalSplit


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]}


def write(path: Path, rows: list[dict[str, Any]]) -> DataSource:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return DataSource(source=str(path))


def texts(prepared: Prepared, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(document.ids[document.loss_mask == 1]) for document in prepared.train]


def test_a_prompt_longer_than_max_length_is_dropped_and_counted_with_its_line(
    smollm2_folder: Path, smollm2: Tokenizer, tmp_path: Path
) -> None:
    rows = [chat(f"q{i}", f"a{i}") for i in range(10)]
    rows.insert(4, chat("word " * 200, "short"))
    data = DataSpec(train=[write(tmp_path / "r.jsonl", rows)], max_length=64)
    prepared = prepare(data, smollm2_folder, cache_dir=tmp_path, seed=0)
    report = prepared.report
    assert report.dropped["no trained token within max_length 64"].lines == [f"{tmp_path}/r.jsonl:5"]
    assert (report.rows_in, report.rows_train, report.rows_dropped) == (11, 10, 1)
    assert texts(prepared, smollm2) == [f"a{i}<|im_end|>" for i in range(10)]
    assert all(document.loss_mask[1:].any() for document in prepared.train)


def test_when_every_row_is_dropped_preparation_fails_and_says_why(smollm2_folder: Path, tmp_path: Path) -> None:
    data = DataSpec(train=[write(tmp_path / "r.jsonl", [chat("word " * 200, "short")] * 3)], max_length=64)
    with pytest.raises(
        DataError, match=r"no training row is left of 3 \(3 rows: no trained token within max_length 64\)"
    ):
        prepare(data, smollm2_folder, cache_dir=tmp_path, seed=0)
    assert not any(entry.is_dir() for entry in (tmp_path / "prepared").iterdir()), "a failed build left something"


def test_a_weight_that_leaves_no_row_is_said(smollm2_folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "r.jsonl", [chat("q", "a")] * 3)
    data = DataSpec(train=[DataSource(source=source.source, weight=1e-9)], max_length=64)
    with pytest.raises(DataError, match=r"no training row is left of 3: .*weight"):
        prepare(data, smollm2_folder, cache_dir=tmp_path, seed=0)


def test_a_chat_template_that_is_not_there_is_named_with_its_field(smollm2_folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "r.jsonl", [chat("q", "a")])
    data = DataSpec(train=[source], chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(DataError, match=r"none.jinja: data.chat_template: .*cannot be read: No such file"):
        prepare(data, smollm2_folder, cache_dir=tmp_path, seed=0)


def test_the_system_message_that_every_row_has_is_in_the_report(smollm2_folder: Path, tmp_path: Path) -> None:
    def rows(*systems: str) -> list[dict[str, Any]]:
        turns = [[{"role": "system", "content": system}] if system else [] for system in systems]
        return [{"messages": [*turn, *chat("q", str(index))["messages"]]} for index, turn in enumerate(turns)]

    for index, (systems, wanted) in enumerate([(["a"] * 5, ["a"]), ([""] * 2, [""]), (["a", "", "b"], ["a", ""])]):
        source = write(tmp_path / f"{index}.jsonl", rows(*systems))
        prepared = prepare(DataSpec(train=[source]), smollm2_folder, cache_dir=tmp_path, seed=0)
        assert prepared.report.systems == wanted
        dropped = prepare(DataSpec(train=[source], system="drop"), smollm2_folder, cache_dir=tmp_path, seed=0)
        assert dropped.report.systems == []


def test_overflow_truncates_at_the_end_or_drops(smollm2_folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "r.jsonl", [chat("q", "word " * 100), chat("q", "a")])
    cut = prepare(DataSpec(train=[source], max_length=64), smollm2_folder, cache_dir=tmp_path, seed=0)
    assert (cut.train.lengths.max(), cut.report.rows_truncated, len(cut.train)) == (64, 1, 2)
    assert cut.train[0].loss_mask[-1] == 1
    dropped = prepare(
        DataSpec(train=[source], max_length=64, overflow="drop"), smollm2_folder, cache_dir=tmp_path, seed=0
    )
    assert dropped.report.dropped["longer than max_length 64"].count == 1


def test_a_message_of_weight_0_is_not_trained_and_one_of_weight_1_is(
    smollm2_folder: Path, smollm2: Tokenizer, tmp_path: Path
) -> None:
    row = {"messages": [*chat("a", "no", weight=0)["messages"], *chat("b", "yes", weight=1)["messages"]]}
    data = DataSpec(train=[write(tmp_path / "w.jsonl", [row])])
    prepared = prepare(data, smollm2_folder, cache_dir=tmp_path, seed=0)
    assert texts(prepared, smollm2) == ["yes<|im_end|>"]
    three = {"messages": [*row["messages"], *chat("c", "plain")["messages"]]}
    source = write(tmp_path / "t.jsonl", [three])
    wanted = {"all": "yes<|im_end|>plain<|im_end|>", "weights": "yes<|im_end|>", "completion": "plain<|im_end|>"}
    for train_on, text in wanted.items():
        made = prepare(DataSpec(train=[source], train_on=train_on), smollm2_folder, cache_dir=tmp_path, seed=0)
        assert texts(made, smollm2) == [text]


def test_history_of_alpaca_rows_is_trained_under_all_and_not_under_last(
    smollm2_folder: Path, smollm2: Tokenizer, tmp_path: Path
) -> None:
    row = {"instruction": "Name a bird.", "input": "", "output": "Kea", "history": [["Hi", "Hello"]]}
    source = write(tmp_path / "a.jsonl", [row])
    for train_on, text in {"all": "Hello<|im_end|>Kea<|im_end|>", "last": "Kea<|im_end|>"}.items():
        made = prepare(DataSpec(train=[source], train_on=train_on), smollm2_folder, cache_dir=tmp_path, seed=0)
        assert texts(made, smollm2) == [text]


def test_the_stop_token_is_trained_when_pad_is_eos(smollm2_folder: Path, smollm2: Tokenizer, tmp_path: Path) -> None:
    assert smollm2.pad_id in smollm2.eos_ids
    data = DataSpec(train=[write(tmp_path / "p.jsonl", [chat("q", "a"), chat("longer question", "longer answer")])])
    for document in prepare(data, smollm2_folder, cache_dir=tmp_path, seed=0).train:
        trained = document.ids[document.loss_mask == 1]
        assert trained[-1] == smollm2.pad_id
        assert (trained == smollm2.pad_id).sum() == 1


def test_evaluation_rows_are_held_out_before_rows_are_repeated(smollm2_folder: Path, tmp_path: Path) -> None:
    rows = [chat(f"q{i % 8}", f"a{i % 8}") for i in range(10)]  # two rows have a duplicate
    source = write(tmp_path / "r.jsonl", rows).model_copy(update={"weight": 5.0})
    data = DataSpec(train=[source], eval=EvalSplit(split=0.2))
    prepared = prepare(data, smollm2_folder, cache_dir=tmp_path, seed=0)
    assert prepared.eval is not None
    training = [document.ids.tobytes() for document in prepared.train]
    held_out = {document.ids.tobytes() for document in prepared.eval}
    assert held_out
    assert not held_out & set(training)
    assert len(training) == 5 * (10 - len(prepared.eval))
    assert prepared.report.rows_train + prepared.report.rows_eval == 10


def test_a_weight_below_one_draws_a_share_and_whole_parts_repeat(smollm2_folder: Path, tmp_path: Path) -> None:
    big = write(tmp_path / "big.jsonl", [chat(f"b{i}", "a") for i in range(10)])
    small = write(tmp_path / "small.jsonl", [chat(f"s{i}", "a") for i in range(4)])
    sources = [big.model_copy(update={"weight": 0.5}), small.model_copy(update={"weight": 2.5})]
    made = prepare(DataSpec(train=sources), smollm2_folder, cache_dir=tmp_path, seed=1)
    assert len(made.train) == 5 + 10
    assert len({document.ids.tobytes() for document in made.train}) == 5 + 4


def test_evaluation_files_lose_the_rows_that_are_trained_on(smollm2_folder: Path, tmp_path: Path) -> None:
    train = write(tmp_path / "t.jsonl", [chat("a", "1"), chat("b", "2")])
    held = write(tmp_path / "e.jsonl", [chat("b", "2"), chat("c", "3")])
    data = DataSpec(train=[train], eval=EvalSplit(sources=[held]))
    made = prepare(data, smollm2_folder, cache_dir=tmp_path, seed=0)
    assert made.eval is not None
    assert len(made.eval) == 1
    assert made.report.dropped["an evaluation row that is also a training row"].lines == [f"{tmp_path}/e.jsonl:1"]


def test_prepared_data_is_reused_only_while_every_input_is_the_same(smollm2_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    rows = [chat(f"q{i}", "a") for i in range(4)]
    template = tmp_path / "t.jinja"
    template.write_text((smollm2_folder / "chat_template.jinja").read_text())

    def made(max_length: int = 64, chat_template: str | None = None, seed: int = 0) -> Prepared:
        data = DataSpec(train=[write(path, rows)], max_length=max_length, chat_template=chat_template)
        return prepare(data, smollm2_folder, cache_dir=tmp_path / "cache", seed=seed)

    first = made()
    assert not first.report.from_cache
    again = made()
    assert again.report.from_cache
    assert again.folder == first.folder
    assert not made(max_length=65).report.from_cache
    assert not made(seed=1).report.from_cache
    assert not made(chat_template=str(template)).report.from_cache
    assert made(chat_template=str(template)).report.from_cache
    template.write_text(template.read_text() + "{# changed #}")
    assert not made(chat_template=str(template)).report.from_cache
    rows[2] = chat("other", "a")
    assert not made().report.from_cache


def _prepare_in_process(source: str, folder: str, cache: str) -> None:
    prepare(DataSpec(train=[DataSource(source=source)]), folder, cache_dir=cache, seed=0)


def test_two_processes_that_prepare_the_same_data_end_with_one_whole_result(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "r.jsonl", [chat(f"question {i}", "answer " * (i % 50)) for i in range(500)])
    code = (
        "import sys; from gym_data import prepare; from gym_sdk.spec.data import DataSource, DataSpec; "
        "prepare(DataSpec(train=[DataSource(source=sys.argv[1])]), sys.argv[2], cache_dir=sys.argv[3], seed=0)"
    )
    command = [sys.executable, "-c", code, source.source, str(smollm2_folder), str(tmp_path / "cache")]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    (only,) = (tmp_path / "cache" / "prepared").iterdir()
    assert len(TokenStore(only / "train")) == 500


def test_a_killed_preparation_leaves_nothing_that_is_used(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "r.jsonl", [chat(f"q{i}", "a") for i in range(50)])
    child = os.fork()
    if not child:
        from gym_data.store import cache

        monkeypatch.setattr(cache, "_sync_folder", lambda folder: os.kill(os.getpid(), signal.SIGKILL))
        _prepare_in_process(source.source, str(smollm2_folder), str(tmp_path))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [entry.name[0] for entry in (tmp_path / "prepared").iterdir()] == ["."]
    made = prepare(DataSpec(train=[source]), smollm2_folder, cache_dir=tmp_path, seed=0)
    assert not made.report.from_cache
    assert len(made.train) == 50


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for a process of another by Linux's pidfd")
def test_no_preparing_process_outlives_a_killed_parent(smollm2_folder: Path, tmp_path: Path) -> None:
    rows = write(tmp_path / "r.jsonl", [chat(f"question {i}", "answer " * 50) for i in range(2000)])
    large = tmp_path / "large.jsonl"
    large.write_bytes(Path(rows.source).read_bytes() * 60)
    code = (
        "import os, sys; from gym_data.preparing import workers; from gym_data import prepare; "
        "from gym_sdk.spec.data import DataSource, DataSpec\n"
        "class Told(workers.Workers):\n"
        "    def __init__(self, *given):\n"
        "        super().__init__(*given); print(*(process.pid for process in self._processes), flush=True)\n"
        "from gym_data import _prepare; _prepare.Workers = Told\n"
        "data = DataSpec(train=[DataSource(source=sys.argv[1])], num_workers=2)\n"
        "prepare(data, sys.argv[2], cache_dir=sys.argv[3], seed=0)"
    )
    command = [sys.executable, "-c", code, str(large), str(smollm2_folder), str(tmp_path / "cache")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        assert parent.poll() is None  # there is work for longer than this test takes
        parent.kill()
    for worker in workers:
        assert select.select([worker], [], [], 30)[0], "a worker lives on"
        os.close(worker)


def test_text_is_trained_whole_ends_with_eos_and_is_cut_into_pieces(
    smollm2_folder: Path, smollm2: Tokenizer, tmp_path: Path
) -> None:
    body = "A kea flew over the ridge. " * 40
    made = prepare(
        DataSpec(train=[write(tmp_path / "t.jsonl", [{"text": body}])], max_length=64),
        smollm2_folder,
        cache_dir=tmp_path,
        seed=0,
    )
    assert made.report.rows_train == 1
    ids = np.concatenate([document.ids for document in made.train])
    assert smollm2.decode(ids[:-1]) == body
    assert ids[-1] == smollm2.eos_ids[0]
    assert all(document.loss_mask.all() for document in made.train)
    assert made.train.lengths.max() == 64


def test_three_rendered_rows_say_what_is_trained(smollm2_folder: Path, tmp_path: Path) -> None:
    rows = [chat("q" * i, "a" * i) for i in range(1, 20)]
    report = prepare(
        DataSpec(train=[write(tmp_path / "r.jsonl", rows)]), smollm2_folder, cache_dir=tmp_path, seed=0
    ).report
    assert len(report.samples) == 3
    for sample in report.samples:
        trained = [token.text for token in sample.tokens if token.trained]
        assert len(trained) == 1
        assert trained[0].endswith("a<|im_end|>")
    assert report.from_json(report.to_json()).samples == report.samples


def test_packing_fills_bins_keeps_rows_whole_and_is_reproducible() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 0.8, 20_000).astype(int), 1, 2048)
    rows = np.concatenate(list(steps(lengths, batch_size=20_000, seed=7, epoch=0)))
    assert sorted(rows.tolist()) == list(range(20_000))
    bins = micro_batches(rows, lengths, 2048)
    assert bins == micro_batches(rows, lengths, 2048)
    assert sorted(row for rows_of_bin in bins for row in rows_of_bin) == list(range(20_000))
    loads = [int(lengths[rows_of_bin].sum()) for rows_of_bin in bins]
    assert max(loads) <= 2048
    assert sum(loads) / (len(bins) * 2048) >= 0.995
    assert not np.array_equal(rows, np.concatenate(list(steps(lengths, batch_size=20_000, seed=7, epoch=1))))


def test_gsm8k_like_and_seed_task_like_rows_prepare_whole(smollm2_folder: Path, tmp_path: Path) -> None:
    questions = write(tmp_path / "g.jsonl", [{"question": f"{i} ducks?", "answer": f"#### {i}"} for i in range(5)])
    made = prepare(DataSpec(train=[questions]), smollm2_folder, cache_dir=tmp_path, seed=0)
    assert (made.report.rows_in, made.report.rows_train) == (5, 5)
    assert made.report.sources[0]["format"] == "prompt_completion"


def test_several_processes_prepare_the_same_as_one(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_data.sources import jsonl

    monkeypatch.setattr(jsonl.jsonl_chunks, "__defaults__", (4096,))
    rows = [chat(f"question {i}", "answer " * (i % 9), weight=i % 3 and 1) for i in range(400)]
    source = write(tmp_path / "r.jsonl", rows)
    made = [
        prepare(
            DataSpec(train=[source], eval=EvalSplit(split=0.1), num_workers=count),
            smollm2_folder,
            cache_dir=tmp_path / str(count),
            seed=3,
        )
        for count in (0, 2)
    ]
    one, two = made
    assert one.report.to_json() == two.report.to_json()
    for name in ("tokens", "loss_mask", "offsets", "rows", "roles", "groups"):
        assert np.array_equal(getattr(one.train, name), getattr(two.train, name))
    rows[350] = {"messages": [{"role": "moderator", "content": "x"}, {"role": "assistant", "content": "y"}]}
    data = DataSpec(train=[write(tmp_path / "r.jsonl", rows)], num_workers=2)
    with pytest.raises(DataError, match=r"r.jsonl:351: messages\[0\].role: unknown role 'moderator'"):
        prepare(data, smollm2_folder, cache_dir=tmp_path / "2", seed=3)
