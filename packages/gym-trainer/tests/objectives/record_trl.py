"""Records what TRL's own losses give for the known models and rows, into trl.json.

    python -m pip install --target TRL --no-deps trl==1.16.0 datasets dill multiprocess xxhash pandas pyarrow
    PYTHONPATH=TRL python packages/gym-trainer/tests/objectives/record_trl.py

TRL is no dependency of the tests: they compare with the recorded numbers.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from known import fingerprint, known_model, label_store, noise, pair_store

from gym_trainer.objectives.kto import MismatchedRows

OUT = Path(__file__).with_name("trl.json")

DPO = {
    "sigmoid": {},
    "hinge": {},
    "ipo": {},
    "robust": {"label_smoothing": 0.2},
    "apo_zero": {},
    "apo_down": {},
    "sft": {},
    "sigmoid, length_alpha": {"ld_alpha": 0.4},
}
BETA = 0.3


def padded(documents: list[Any]) -> dict[str, torch.Tensor]:
    longest = max(len(d.ids) for d in documents)
    ids = torch.zeros(len(documents), longest, dtype=torch.long)
    mask, completion = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, d in enumerate(documents):
        ids[row, : len(d.ids)] = torch.tensor(d.ids.astype(np.int64))
        mask[row, : len(d.ids)] = 1
        completion[row, : len(d.ids)] = torch.tensor(d.loss_mask.astype(np.int64))
    return {"input_ids": ids, "attention_mask": mask, "completion_mask": completion}


def stub(**values: Any) -> Any:
    from accelerate import Accelerator

    common = {
        "precompute_ref_logps": False,
        "aux_loss_enabled": False,
        "accelerator": Accelerator(cpu=True),
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None, center_rewards_coefficient=0.05),
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "beta": BETA,
        "label_smoothing": 0.0,
    }
    return SimpleNamespace(**(common | values))


def dpo() -> dict[str, Any]:
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    found = {}
    for name, options in DPO.items():
        policy, reference = known_model(1.0), known_model(2.0)
        add_fused_lm_head(policy, outputs=["log_probs", "entropy", "mean_logits", "is_top1"])
        add_fused_lm_head(reference)
        values = {
            "model": policy,
            "ref_model": reference,
            "ld_alpha": None,
            "loss_types": [name.split(",")[0]],
            "loss_weights": [1.0],
            "f_divergence_type": "reverse_kl",
            "use_weighting": False,
        }
        trainer = stub(**(values | options))
        losses = []
        for pair in pair_store().groups:  # one at a time: its sft term is a mean over the tokens of the batch
            loss = DPOTrainer._compute_loss(trainer, policy, padded(list(pair)), False)
            (loss / 6).backward()
            losses.append(loss.item())
        metrics = {key: float(np.mean(v)) for key, v in trainer._metrics["eval"].items() if "/" in key}
        found[name] = {"loss": float(np.mean(losses)), "gradient": fingerprint(policy), "metrics": metrics}
    return found


def kto() -> dict[str, Any]:
    from trl.trainer.kto_trainer import KTOTrainer
    from trl.trainer.utils import add_fused_lm_head

    found = {}
    for name, keys in {"kl above 0": (2.0, 1.0), "kl at 0": (1.0, 2.0)}.items():
        policy, reference = (known_model(key) for key in keys)
        add_fused_lm_head(policy, outputs=["log_probs", "entropy", "mean_logits", "is_top1"])
        add_fused_lm_head(reference)
        rows = MismatchedRows(label_store(), seed=0)  # type: ignore[arg-type]
        every = [rows.row(index) for index in range(len(rows))]
        batch = padded([row.documents[0] for row in every])
        batch |= {f"KL_{key}": v for key, v in padded([row.statistics_documents[0] for row in every]).items()}
        batch["label"] = torch.tensor([row.documents[0].role.name == "DESIRABLE" for row in every])
        trainer = stub(
            model=policy,
            ref_model=reference,
            calculate_KL=True,
            loss_type="kto",
            desirable_weight=1.2,
            undesirable_weight=0.7,
        )
        trainer._compute_kl_logps = lambda model, batch, trainer=trainer: KTOTrainer._compute_kl_logps(
            trainer, model, batch
        )
        loss = KTOTrainer._compute_loss(trainer, policy, batch, False)
        loss.backward()
        metrics = {key: float(np.mean(v)) for key, v in trainer._metrics["eval"].items() if "/" in key or key == "kl"}
        found[name] = {"loss": loss.item(), "gradient": fingerprint(policy), "metrics": metrics}
    return found


def reference_free() -> dict[str, Any]:
    """The preference terms: TRL's likelihood term counts the prompt too, which no paper does."""
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    found = {}
    for name in ("orpo", "simpo", "sigmoid", "hinge", "ipo"):
        policy = known_model(1.0)
        losses = []
        for pair in pair_store().groups:
            batch = padded(list(pair))
            labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
            logits = policy(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            mean = name in ("orpo", "simpo", "ipo")
            trainer_class = ORPOTrainer if name == "orpo" else CPOTrainer
            chosen, rejected = trainer_class.get_batch_logps(logits, labels, average_log_prob=mean)
            trainer = stub(loss_type=name, alpha=0.0, simpo_gamma=0.7)
            if name == "orpo":
                # beside the likelihood of the answer, which TRL takes over the prompt too
                loss = -chosen - ORPOTrainer.odds_ratio_loss(trainer, chosen[None], rejected[None])[0].mean()
            else:
                loss = CPOTrainer.cpo_loss(trainer, chosen[None], rejected[None])[0].mean()
            losses.append(loss)
        total = torch.stack(losses).mean()
        total.backward()
        found[name] = {"loss": total.item(), "gradient": fingerprint(policy)}
    return found


def reward() -> dict[str, Any]:
    from trl.trainer.reward_trainer import RewardTrainer

    scores = noise(12, 3.0).requires_grad_()  # chosen, then rejected
    trainer = stub(model=nn.Identity())
    inputs = {"attention_mask": torch.ones(12, 1)}
    loss = RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=scores[:, None]), inputs, False)
    loss.backward()
    assert scores.grad is not None
    return {"loss": loss.item(), "gradient": scores.grad.tolist()}


def distillation() -> dict[str, Any]:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    found = {}
    for name, beta in {"forward_kl": 0, "reverse_kl": 1, "jsd": 0.3}.items():
        student, teacher = known_model(1.0), known_model(2.0)
        losses = []
        for pair in pair_store().groups:
            batch = padded([pair[0]])
            labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)[:, 1:]
            inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
            with torch.no_grad():
                wanted = teacher(**inputs).logits[:, :-1]
            logits = student(**inputs).logits[:, :-1]
            losses.append(GKDTrainer.generalized_jsd_loss(logits, wanted, labels, beta, 1.7, reduction="sum"))
        count = sum(int(pair[0].loss_mask.sum()) for pair in pair_store().groups)
        total = torch.stack(losses).sum() / count
        total.backward()
        found[name] = {"loss": total.item(), "gradient": fingerprint(student)}
    return found


if __name__ == "__main__":
    import trl

    recorded = {
        "trl": trl.__version__,
        "dpo": dpo(),
        "kto": kto(),
        "reference_free": reference_free(),
        "reward": reward(),
        "distillation": distillation(),
    }
    OUT.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
