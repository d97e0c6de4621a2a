"""Guards reward models and classifiers: the head reads each document's last token, and the losses are their papers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from known import GroupStore, document, fill, gradients, known_model, measure, noise, pair_store
from transformers import LlamaForSequenceClassification

from gym_data import Tokenizer
from gym_data.store import DocumentRole
from gym_sdk.errors import DataError
from gym_sdk.spec import Reward
from gym_trainer.loop.batch import Row, StoreRows
from gym_trainer.objectives.classes import LABEL, Classes, ClassRows
from gym_trainer.objectives.scoring import ClassificationObjective, RewardObjective

TRL = json.loads(Path(__file__).with_name("trl.json").read_text())["reward"]


def scorer(num_labels: int) -> LlamaForSequenceClassification:
    config = known_model(1.0).config
    config.num_labels = num_labels
    config.pad_token_id = 0
    model = LlamaForSequenceClassification(config).double().eval()
    fill(model, 1.0)
    return model


def score(model: LlamaForSequenceClassification, document: Any) -> torch.Tensor:
    """The head on the last hidden state, by one plain forward of this document alone."""
    ids = torch.tensor(document.ids.astype(np.int64))[None]
    return model.score(model.model(input_ids=ids).last_hidden_state[0, -1])


@pytest.mark.parametrize("layout", ["packed", "shared", "padded"])
@pytest.mark.parametrize("tokens", [30, 10_000])
def test_a_reward_and_its_gradient_are_those_of_the_paper(tokens: int, layout: str) -> None:
    model, store = scorer(1), pair_store()
    losses = []
    for chosen, rejected in store.groups:
        good, bad = score(model, chosen)[0], score(model, rejected)[0]
        losses.append(torch.log(1 + torch.exp(bad - good)) + 0.05 * (good + bad) ** 2)
    expected = torch.stack(losses).mean()
    expected.backward()
    expected_gradients = gradients(model)

    result = measure(RewardObjective(Reward(centering=0.05)), model, StoreRows(store), tokens=tokens, layout=layout)  # type: ignore[arg-type]

    assert result.loss == pytest.approx(expected.item(), rel=1e-6)
    assert "score.weight" in expected_gradients
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-5, atol=1e-8, msg=name)


def test_a_reward_loss_is_trls() -> None:
    class Scores:
        """A model that has these scores, chosen and rejected in turn."""

        values = noise(12, 3.0).requires_grad_()

        def scores(self, batch: Any) -> torch.Tensor:
            return torch.stack([self.values[:6], self.values[6:]], 1).flatten()[:, None]

    loss = RewardObjective(Reward(centering=0.05)).loss(Scores(), None, {}).loss / 6  # type: ignore[arg-type]
    (slope,) = torch.autograd.grad(loss, Scores.values)
    assert loss.item() == pytest.approx(TRL["loss"], rel=1e-6)
    assert slope.tolist() == pytest.approx(TRL["gradient"], rel=1e-5)


def test_plain_transformers_scores_the_token_that_training_did() -> None:
    model = scorer(3)
    documents = [d for pair in pair_store().groups for d in pair if int(d.ids[-1]) != 0]
    for each in documents:
        ids = torch.tensor(each.ids.astype(np.int64))[None]
        torch.testing.assert_close(model(input_ids=ids).logits[0], score(model, each))


class GivenRows(StoreRows):
    def row(self, index: int) -> Row:
        row = super().row(index)
        return Row(index=index, documents=row.documents, document_values={LABEL: (float(index % 3),)})


@pytest.mark.parametrize("layout", ["packed", "shared", "padded"])
def test_a_classifiers_loss_and_gradient_are_cross_entropy_over_rows(layout: str) -> None:
    model = scorer(3)
    store = GroupStore([(document(5 + 3 * row, 2, 9.0 + row, DocumentRole.PLAIN, row),) for row in range(7)])
    scores = torch.stack([score(model, group[0]) for group in store.groups])
    labels = torch.arange(7) % 3
    expected = -(scores - torch.logsumexp(scores, -1, keepdim=True)).gather(1, labels[:, None]).mean()
    expected.backward()
    expected_gradients = gradients(model)
    objective = ClassificationObjective.__new__(ClassificationObjective)

    result = measure(objective, model, GivenRows(store), tokens=20, layout=layout)  # type: ignore[arg-type]

    assert result.loss == pytest.approx(expected.item(), rel=1e-6)
    assert result.metrics["accuracy"] == (int((scores.argmax(-1) == labels).sum()), 7)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-5, atol=1e-8, msg=name)


class TestClasses:
    """Rows whose answer is the name of a class."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        from tiny_folder import write_tiny_folder

        return write_tiny_folder(tmp_path / "tiny")

    def prepared(self, folder: Path, rows: list[dict[str, Any]]) -> Any:
        from gym_data import prepare
        from gym_sdk.spec.data import DataSource, DataSpec

        path = folder.parent / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataSpec(train=[DataSource(source=str(path))])
        return prepare(data, folder, cache_dir=folder.parent, seed=0, objective="sft").train

    def test_the_prompt_is_what_is_scored_and_the_last_answer_is_the_class(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_folder(folder)
        turns = [
            {"role": "user", "content": "a lion"},
            {"role": "assistant", "content": "cat"},
            {"role": "user", "content": "a kudu"},
            {"role": "assistant", "content": "antelope"},
        ]
        store = self.prepared(folder, [{"messages": turns}, {"messages": turns[:2]}])
        classes = Classes.of([], store, tokenizer, {"train": ["rows.jsonl"]})
        assert classes.names == ("antelope", "cat")
        rows = ClassRows(store, classes)
        assert [rows.row(index).document_values[LABEL] for index in range(2)] == [(0.0,), (1.0,)]
        text = tokenizer.decode(rows.row(0).documents[0].ids)
        assert text.endswith("a kudu<|im_end|>\n<|im_start|>assistant\n")
        assert "cat" in text
        assert rows.lengths_N[0] == len(rows.row(0).documents[0].ids)

    @pytest.mark.parametrize(
        ("answers", "labels", "message"),
        [
            (["cat", "cat"], [], "every row has the same answer, 'cat'"),
            ([f"text {n}" for n in range(30)], [], "30 different answers in 30 rows are texts, not classes"),
            (["cat", "dog"], ["cat", "cow"], "the answer 'dog' is none of the classes \\(cat, cow\\)"),
        ],
    )
    def test_answers_that_are_no_classes_are_refused(
        self, folder: Path, answers: list[str], labels: list[str], message: str
    ) -> None:
        rows = [{"prompt": f"q{n}", "completion": answer} for n, answer in enumerate(answers)]
        store = self.prepared(folder, rows)
        tokenizer = Tokenizer.from_folder(folder)
        with pytest.raises(DataError, match=message) as error:
            ClassRows(store, Classes.of(labels, store, tokenizer, {"train": ["rows.jsonl"]}))
        assert str(error.value.where) == ("rows.jsonl:2" if labels else "rows.jsonl")

    def test_of_several_files_the_refusal_names_all_that_the_row_may_be_in(self, folder: Path) -> None:
        store = self.prepared(folder, [{"prompt": "q", "completion": "dog"}])
        files = {"train": ["a.jsonl", "b.jsonl"]}
        with pytest.raises(DataError, match=r"row 1 of one of a\.jsonl, b\.jsonl: the answer 'dog'"):
            ClassRows(store, Classes.of(["cat", "cow"], store, Tokenizer.from_folder(folder), files))
