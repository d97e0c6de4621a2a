"""Guards what a person reads when run.yaml is wrong: every fault at once, each with its place and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_sdk.errors import SpecError
from gym_sdk.spec import DataSpec, RunSpec, TrainSpec, load_spec, spec_from_data
from gym_sdk.spec._fields import all_fields

GOOD = """\
model: {source: Qwen/Qwen3-8B}
data:
  train: [{source: rows.jsonl}]
"""


def problems_of(folder: Path, text: str, *overrides: str, name: str = "run.yaml") -> list[str]:
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_spec(folder / name, overrides)
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


ONE_FAULT = [
    # Unknown keys
    ("trian: {}", "run.yaml:4: trian: unknown key; did you mean train?"),
    ("train: {epoch: 3}", "run.yaml:4: train.epoch: unknown key; did you mean epochs?"),
    ("train: {lr: 1e-4}", "run.yaml:4: train.lr: unknown key; it is called train.learning_rate here"),
    ("adapter: {r: 8}", "run.yaml:4: adapter.r: unknown key of adapter kind lora; it is called adapter.rank here"),
    ("learning_rate: 1e-4", "run.yaml:4: learning_rate: unknown key; did you mean train.learning_rate?"),
    ("output_dir: x", "run.yaml:4: output_dir: unknown key; it is called output.dir here"),
    (
        "adapter: {kind: full, rank: 8}",
        "run.yaml:4: adapter.rank: unknown key of adapter kind full; it belongs to kind lora, vera",
    ),
    ("parallel: {zzz: 1}", "run.yaml:4: parallel.zzz: unknown key; known keys are strategy"),
    # Kinds
    (
        "adapter: {kind: lroa}",
        'run.yaml:4: adapter.kind: must be one of lora, oft, vera, ia3, freeze, full; got "lroa"; did you mean lora?',
    ),
    ("adapter: {kind: 3}", "run.yaml:4: adapter.kind: must be one of lora, oft, vera, ia3, freeze, full; got 3"),
    (
        "adapter: lora",
        "run.yaml:4: adapter: must be a mapping whose kind is one of lora, oft, vera, ia3, freeze, full; "
        'got "lora"; write {kind: lora}',
    ),
    # Types
    ("train: {epochs: no}", 'run.yaml:4: train.epochs: must be a number above 0; got "no"'),
    (
        "train: {batch_size: '16'}",
        'run.yaml:4: train.batch_size: must be a whole number of at least 1; got "16"; write it without quotes',
    ),
    ("train: {batch_size: 2.5}", "run.yaml:4: train.batch_size: must be a whole number of at least 1; got 2.5"),
    ("train: {batch_size: true}", "run.yaml:4: train.batch_size: must be a whole number of at least 1; got true"),
    ("train: {batch_size:}", "run.yaml:4: train.batch_size: must be a whole number of at least 1; got null"),
    ("train: {batch_size: [1, 2]}", "run.yaml:4: train.batch_size: must be a whole number of at least 1; got a list"),
    ("output: {merge: yes}", 'run.yaml:4: output.merge: must be true or false; got "yes"; write true'),
    ("output: {merge: off}", 'run.yaml:4: output.merge: must be true or false; got "off"; write false'),
    ("output: {dir: 7}", "run.yaml:4: output.dir: must be text that is not empty; got 7; put it in quotes"),
    ("output: {report_to: tensorboard}", 'run.yaml:4: output.report_to: must be a list of text; got "tensorboard"'),
    ("output: {report_to: [1]}", "run.yaml:4: output.report_to[0]: must be text; got 1; put it in quotes"),
    (
        "train: 3",
        f"run.yaml:4: train: must be a mapping with the keys {', '.join(TrainSpec.model_fields)}; got 3",
    ),
    ("train: {epochs: .inf}", "run.yaml:4: train.epochs: must be a number above 0; got .inf"),
    ("train: {epochs: .nan}", "run.yaml:4: train.epochs: must be a number above 0; got .nan"),
    # Ranges and choices
    ("train: {epochs: 0}", "run.yaml:4: train.epochs: must be a number above 0; got 0"),
    ("adapter: {rank: 0}", "run.yaml:4: adapter.rank: must be a whole number from 1 to 4096; got 0"),
    ("adapter: {dropout: 1}", "run.yaml:4: adapter.dropout: must be a number of at least 0 and below 1; got 1"),
    ("seed: -1", "run.yaml:4: seed: must be a whole number of at least 0 and below 4294967296; got -1"),
    (
        "name: a b",
        "run.yaml:4: name: must be text of at most 63 letters (a to z), digits, dots, dashes and underscores, "
        'beginning with a letter or digit; got "a b"',
    ),
    (
        'output: {dir: "a\\0b"}',
        "run.yaml:4: output.dir: holds the character U+0000, which no UTF-8 file or file name "
        'can have; got "a\\u0000b"',
    ),
    (
        "train: {micro_batch_tokens: 99999999999999999999}",
        "run.yaml:4: train.micro_batch_tokens: a number beyond 9223372036854775807; got 99999999999999999999",
    ),
    (
        "adapter: {targets: []}",
        "run.yaml:4: adapter.targets: names no module; leave it out for all linear layers",
    ),
    # Slips of the pen, with what was meant
    ("adapter: {rank: 8.0}", "run.yaml:4: adapter.rank: must be a whole number from 1 to 4096; got 8.0; write 8"),
    (
        "train: {max_steps: 1e3}",
        "run.yaml:4: train.max_steps: must be a whole number of at least 1, or null; got 1000.0; write 1000",
    ),
    (
        "train: {batch_size: 1_000}",
        'run.yaml:4: train.batch_size: must be a whole number of at least 1; got "1_000"; write 1000',
    ),
    (
        "train: {schedule: cosin}",
        'run.yaml:4: train.schedule: must be one of cosine, linear, constant, wsd; got "cosin"; did you mean cosine?',
    ),
    (
        "performance: {recompute_layers: -1}",
        "run.yaml:4: performance.recompute_layers: must be a whole number of at least 0, or auto; got -1",
    ),
    ("adapter: {targets: [1]}", "run.yaml:4: adapter.targets: must be text, or a list of text; got a list"),
    (
        "spec_version: 2",
        "run.yaml:4: spec_version: written for version 2 of the specification, and this gym reads up to 1",
    ),
    # Conflicts
    (
        "adapter: {kind: full}\noutput: {merge: true}",
        "run.yaml:5: output.merge: adapter kind full has no adapter to merge; the result is a whole model",
    ),
    (
        "adapter: {init: pissa, init_from: there}",
        "run.yaml:4: adapter.init: pissa has no effect on an adapter that starts from init_from",
    ),
    (
        "train: {eval_every_steps: 5}",
        "run.yaml:4: train.eval_every_steps: there are no evaluation rows; set data.eval.split or data.eval.sources",
    ),
    (
        "performance: {device: cpu, attention: varlen}",
        "run.yaml:4: performance.attention: varlen needs a CUDA device, and performance.device is cpu",
    ),
    (
        "train: {decay_ratio: 0.3}",
        "run.yaml:4: train.decay_ratio: has no effect on the schedule cosine, only on wsd",
    ),
    # Methods
    (
        "method: {kind: kto, loss: ipo}",
        "run.yaml:4: method.loss: unknown key of method kind kto; it belongs to kind sft, dpo, cpo",
    ),
    (
        "method: {kind: dpo, reference: adapter_disabled}\nadapter: {kind: full}",
        "run.yaml:4: method.reference: adapter kind full has no adapter to switch off; use frozen_copy, precomputed or "
        "auto",
    ),
    (
        "method: {kind: kto, reference: adapter_disabled}\nadapter: {init_from: there}",
        "run.yaml:4: method.reference: the run starts from adapter.init_from, and without that adapter the model is an "
        "earlier one; use frozen_copy, precomputed or auto",
    ),
    (
        "method: {kind: dpo, reference: adapter_disabled}\nadapter: {init: pissa}",
        "run.yaml:4: method.reference: adapter.init pissa changes the weights beside the adapter; use frozen_copy, "
        "precomputed or auto",
    ),
    (
        "method: {kind: dpo, loss: robust}",
        "run.yaml:4: method.label_smoothing: robust needs the expected share of wrong labels, above 0",
    ),
    (
        "method: {kind: dpo, loss: ipo, label_smoothing: 0.1}",
        "run.yaml:4: method.label_smoothing: has no effect on ipo",
    ),
    (
        "method: {kind: dpo, extra_losses: [{name: sigmoid}]}",
        "run.yaml:4: method.extra_losses: each loss may stand there once; change its weight instead",
    ),
    (
        "method: {kind: dpo, extra_losses: [{name: nll}]}",
        "run.yaml:4: method.extra_losses[0].name: must be one of sigmoid, ipo, hinge, robust, apo_zero, apo_down, sft; "
        'got "nll"',
    ),
    (
        "method: {kind: reward}\noutput: {merge: true}",
        "run.yaml:5: output.merge: the result of reward has a head of its own and is not merged",
    ),
    (
        "method: {kind: classification}\nevaluation: {tasks: [{data: {source: x}}]}",
        "run.yaml:5: evaluation.tasks: classification gives numbers, and these tasks ask for written answers",
    ),
    ("method: {kind: distillation}", "run.yaml:4: method.teacher: required: text that is not empty"),
    (
        "method: {kind: distillation, teacher: t, beta: 1}",
        "run.yaml:4: method.beta: must be a number above 0 and below 1; got 1",
    ),
    (
        "method: {kind: distillation, teacher: t, beta: 0.3}",
        "run.yaml:4: method.beta: has no effect on forward_kl, only on jsd",
    ),
    (
        "method: {kind: distillation, teacher: t, on_policy_max_tokens: 64}",
        "run.yaml:4: method.on_policy_max_tokens: has no effect: with on_policy_share 0 the student writes nothing",
    ),
]


@pytest.mark.parametrize(("line", "expected"), ONE_FAULT, ids=[line for line, _ in ONE_FAULT])
def test_a_fault_is_named_with_its_place_and_the_way_out(tmp_path: Path, line: str, expected: str) -> None:
    assert problems_of(tmp_path, GOOD + line + "\n") == [expected]


WHOLE_FILES = [
    (
        "model: {source: a/b}\nmethod: {kind: pretrain}\ntrain: {batch_size: 8, batch_tokens: 4096}\n"
        "data:\n  train: [{source: x.txt, revision: main}]\n  packing_strategy: wrapped\n  train_on: last\n"
        "  shuffle_buffer_rows: 10\n",
        [
            "run.yaml:3: train.batch_size: train.batch_tokens stands in its place; give one of them",
            "run.yaml:5: data.train[0].revision: only data sets of the hub have revisions (hub:owner/name)",
            "run.yaml:7: data.train_on: has no effect: pretrain learns every token of plain text, which has no turns",
            "run.yaml:8: data.shuffle_buffer_rows: has no effect without data.streaming: all rows are shuffled",
        ],
    ),
    ("", ["run.yaml: is empty; a run needs at least model and data"]),
    ("# nothing\n", ["run.yaml: is empty; a run needs at least model and data"]),
    (
        "- a\n",
        [
            "run.yaml: must be a mapping with the keys spec_version, name, model, adapter, method, data, train, "
            "evaluation, parallel, performance, output, seed"
        ],
    ),
    (
        "name: x\n",
        [
            "run.yaml:1: model: required: a mapping with the keys source, revision, dtype, quantization, new_tokens, "
            "trust_remote_code",
            f"run.yaml:1: data: required: a mapping with the keys {', '.join(DataSpec.model_fields)}",
        ],
    ),
    (
        "model: {}\ndata: {train: []}\n",
        [
            "run.yaml:1: model.source: required: text that is not empty",
            "run.yaml:2: data.train: must be a non-empty list of mappings; got []",
        ],
    ),
    (
        "model: {source: a}\ndata:\n  train:\n    source: x\n",
        ["run.yaml:3: data.train: must be a non-empty list of mappings; got a mapping; begin the item with a dash"],
    ),
    (
        "model: {source: a}\ndata:\n  train:\n  - source: x\n  - sauce: y\n    limit: 0\n",
        [
            "run.yaml:5: data.train[1].source: required: text that is not empty",
            "run.yaml:5: data.train[1].sauce: unknown key; did you mean source?",
            "run.yaml:6: data.train[1].limit: must be a whole number of at least 1, or null; got 0",
        ],
    ),
    (
        "model: {source: Q/q, quantization: nf4}\nadapter: {kind: full}\ndata: {train: [{source: x}]}\n",
        ["run.yaml:1: model.quantization: nf4 weights are frozen, and adapter kind full trains them"],
    ),
    (
        "model: {source: Q/q, quantization: int8}\nadapter: {init: pissa}\ndata: {train: [{source: x}]}\n",
        ["run.yaml:2: adapter.init: pissa decomposes weights in full precision, and model.quantization is int8"],
    ),
    (
        "model: {source: a.gguf, revision: main}\ndata: {train: [{source: x}]}\n",
        ["run.yaml:1: model.revision: only hub models have revisions, and model.source is a file"],
    ),
    (
        "model: {source: Q/q}\ndata: {train: [{source: x}], eval: {split: 0.1, sources: [{source: y}]}}\n",
        ["run.yaml:2: data.eval.split: give a share of the training rows or sources of their own, not both"],
    ),
    # Syntax
    ("a: 1\na: 2\n", ["run.yaml:2: a: a stands twice, on lines 1 and 2"]),
    ("train:\n  epochs: 1\n  epochs: 2\n", ["run.yaml:3: train.epochs: epochs stands twice, on lines 2 and 3"]),
    ("train:\n\tepochs: 1\n", ["run.yaml:2:1: not valid YAML: a tab where spaces are needed"]),
    ("a: b: c\n", ["run.yaml:1:5: not valid YAML: a `: ` where no key can stand (quote a value that holds one)"]),
    ("a: 1\n---\nb: 1\n", ["run.yaml:2:1: not valid YAML: more than one document"]),
    ("a: &x [*x]\n", ["run.yaml:1:4: a reference to itself"]),
    ("<<: {a: 1}\n", ["run.yaml:1:1: merge keys (<<) are not part of YAML 1.2; write the keys out"]),
    ("[a]: 1\n", ["run.yaml:1:1: a key must be text"]),
    (
        "a: !!python/object:os.system x\n",
        ["run.yaml:1:4: the tag tag:yaml.org,2002:python/object:os.system is not supported here; only plain data is"],
    ),
    ("a: \x01\n", ["run.yaml:1: not valid YAML: the character U+0001 is not allowed"]),
    ("a: " + "9" * 5000, ["run.yaml:1:4: a number of 5000 digits is too long"]),
    ("[" * 5000, ["run.yaml: not valid YAML: nested too deeply"]),
]


@pytest.mark.parametrize(("text", "expected"), WHOLE_FILES, ids=[text[:40] or "empty" for text, _ in WHOLE_FILES])
def test_every_fault_of_a_file_is_reported(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert problems_of(tmp_path, text) == expected


def test_aliases_that_unfold_without_end_are_refused(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    (only,) = problems_of(tmp_path, "\n".join(rows))
    assert only.endswith("too large: its references unfold into more than 100,000 values")


JSON_FILES = [
    ('{"model": 1,\n "model": 2}', ["run.json:2: model: model stands twice, on lines 1 and 2"]),
    ('{"seed": NaN}', ["run.json: not valid JSON: NaN is not JSON"]),
    ('{"seed": ' + "9" * 5000 + "}", ["run.json: not valid JSON: a number of 5000 digits is too long"]),
    ('{"seed": 1,}', ["run.json:1:12: not valid JSON: expecting property name enclosed in double quotes"]),
    (
        '{"model": {"source": "a"},\n\t"data": {\n\t\t"train": [\n{"source": "b", "limt": 2}]}}',
        ["run.json:4: data.train[0].limt: unknown key; did you mean limit?"],
    ),
]


@pytest.mark.parametrize(("text", "expected"), JSON_FILES)
def test_json_files_have_lines_too(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert problems_of(tmp_path, text, name="run.json") == expected


OVERRIDES = [
    ("train.lerning_rate=1", "command line: train.lerning_rate: unknown key; did you mean learning_rate?"),
    (" seed=x", "command line: ' seed' is not a field's path"),
    ("seed=x", 'command line: seed: must be a whole number of at least 0 and below 4294967296; got "x"'),
    ("train.epochs", "command line: 'train.epochs' is not an override"),
    ("=3", "command line: '' is not a field's path"),
    ("train..epochs=3", "command line: 'train..epochs' is not a field's path"),
    ("[0].x=3", "command line: '[0].x' is not a field's path"),
    ("data.train[5].source=x", "command line: data.train[5]: data.train has 1 item"),
    ("data.train[-1].source=x", "command line: 'data.train[-1].source' is not a field's path"),
    ("train[0]=3", "command line: train[0]: train is not a list"),
    ("data.train[1].limit=3", "command line: data.train[1].source: required: text that is not empty"),
    (
        "data.train=[{source: x",
        "command line:1:12: not valid YAML: the mapping that begins on line 1 is not closed",
    ),
    (
        "model.dtype=fp16",
        'command line: model.dtype: must be one of auto, float32, bfloat16, float16; got "fp16"; did you mean float16?',
    ),
]


@pytest.mark.parametrize(("override", "expected"), OVERRIDES, ids=[override for override, _ in OVERRIDES])
def test_a_wrong_override_is_told_like_a_wrong_file(tmp_path: Path, override: str, expected: str) -> None:
    assert problems_of(tmp_path, GOOD, override) == [expected]


SECTIONS = [
    ("model: Q/q\ndata: {train: [{source: x}]}", "model", "; write {source: Q/q}"),
    ("model: {source: a}\ndata: {train: rows.jsonl}", "data.train", "; write [{source: rows.jsonl}]"),
    ("model: {source: a}\ndata: {train: [rows.jsonl]}", "data.train[0]", "; write {source: rows.jsonl}"),
    ("model: {source: a}\ndata: {train: [{source: x}], eval: 0.05}", "data.eval", "; write {split: 0.05}"),
]


@pytest.mark.parametrize(("text", "path", "slip"), SECTIONS, ids=[path for _, path, _ in SECTIONS])
def test_a_plain_value_in_the_place_of_a_section_is_shown_as_one(
    tmp_path: Path, text: str, path: str, slip: str
) -> None:
    (only,) = problems_of(tmp_path, text)
    assert f": {path}: must be" in only
    assert only.endswith(slip)


@pytest.mark.parametrize(
    ("override", "hint"),
    [("--train.batch_size=4", "write train.batch_size=4"), ("seed = 4", "write seed=4"), ("=x", "paths look like")],
)
def test_an_override_with_a_slip_is_shown_without_it(tmp_path: Path, override: str, hint: str) -> None:
    (tmp_path / "run.yaml").write_text(GOOD)
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "run.yaml", [override])
    assert hint in (caught.value.problems[0].hint or "")


def test_a_path_that_is_not_unicode_is_refused_before_it_is_saved(tmp_path: Path) -> None:
    (only,) = problems_of(tmp_path, GOOD, "output.dir=caf\udce9")
    assert only.startswith("command line: output.dir: holds the character U+DCE9")
    assert only.isascii()


def test_one_problem_is_the_whole_message(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD + "seed: -1\n", encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(caught.value) == (
        f"{path}:4: seed: must be a whole number of at least 0 and below 4294967296; got -1\nhint: gym explain seed"
    )
    assert caught.value.exit_code == 2


def test_several_problems_are_a_list_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: -1\n" + GOOD + "nmae: x\n", encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_spec(path, ["train.epochs=0"])
    assert str(caught.value) == (
        f"{path}: 3 problems\n"
        "  command line: train.epochs: must be a number above 0; got 0\n"
        f"  {path}:1: seed: must be a whole number of at least 0 and below 4294967296; got -1\n"
        f"  {path}:5: nmae: unknown key; did you mean name?\n"
        "hint: gym explain train"
    )


def test_no_message_shows_the_validator_behind_it(tmp_path: Path) -> None:
    text = (
        "adapter: {kind: x}\nmethod: 3\ntrain: {epochs: []}\nmodel: []\ndata: {train: [3]}\n"
        "performance: {recompute_layers: {}}\n"
    )
    found = problems_of(tmp_path, text)
    assert len(found) == 6
    for word in ("pydantic", "Input should", "literal", "discriminat", "union", "validation error"):
        assert word not in "\n".join(found)


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(GOOD, encoding="utf-8")
    (tmp_path / "latin.yaml").write_bytes(b"name: ok\nmodel: {source: caf\xe9}\n")
    cases = {
        "run.yaml": f"there is no such file\nhint: {tmp_path} has latin.yaml, other.yaml",
        ".": "is a folder; give the specification's file",
        "latin.yaml": "not UTF-8 text\nhint: save the file as UTF-8",
    }
    for name, expected in cases.items():
        with pytest.raises(SpecError) as caught:
            load_spec(tmp_path / name)
        line = ":2" if name == "latin.yaml" else ""
        assert str(caught.value) == f"{tmp_path / name}{line}: {expected}"


PATHS = sorted({field.path.replace("[]", "[0]") for field in all_fields(RunSpec)})
VALUES = ["null", "-1", "x", "[]", "{}", "[[]]", "{kind: [1]}", "{kind: {}}", "[{}]", ".nan", "1e400", "!x", "*a", "☃"]


@given(st.lists(st.tuples(st.sampled_from(PATHS), st.sampled_from(VALUES)), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_whatever_is_given_the_answer_is_a_specification_or_a_message(changes: list[tuple[str, str]]) -> None:
    good = {"model": {"source": "m"}, "data": {"train": [{"source": "x"}]}}
    messages = ["valid"]
    try:
        spec_from_data(good, overrides=[f"{path}={value}" for path, value in changes])
    except SpecError as error:
        messages = [problem.message for problem in error.problems]
    assert messages
    assert all(messages)
