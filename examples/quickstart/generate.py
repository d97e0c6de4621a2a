"""Makes train.jsonl and held_out.jsonl: ranger patrol notes, each with the record that it says.

    python generate.py            writes both files beside this one; the same seed gives the same bytes

A note is a *frame* (one register's way of telling a sighting) with its slots filled from wording.toml. What a frame
does not say is null in the record. Then come the marks of real notes: capitals on the radio, none in messages, typos,
short forms, and asides that are not about the sighting.

The two splits share
- no sentence: frames, asides and threats are written apart for each;
- no combination of entities: a species with an activity, or a place, that one split has, the other never has. Some
  species stand in held-out notes only.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

HERE = Path(__file__).resolve().parent
ACTIVITIES = ("feeding", "drinking", "resting", "moving", "bathing", "fighting", "dead")
THREATS = ("snare", "gunshots", "fire", "logging", "livestock", "none")
SYSTEM_PROMPT = "Patrol note to JSON: species, count, activity, place, time, threat. Null if not said."
REGISTERS = ("radio", "diary", "report", "sms")

Split = Literal["train", "held_out"]
T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """The record of a note; the fields are the keys of the JSON answer, in this order."""

    species: str
    count: int | None
    activity: str | None
    place: str | None
    time: str | None
    threat: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True)
class Species:
    """One kind of animal and how rangers write it; `short` may be empty, `largest_group` is how many live together."""

    singular: str
    plural: str
    diet: Literal["plants", "meat"]
    short: str
    largest_group: int


@dataclass(frozen=True)
class Row:
    """One note, its record, and the sentences of wording.toml that it was made from."""

    note: str
    answer: Answer
    sentences: tuple[str, ...]

    def to_json(self) -> str:
        messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": self.note},
            {"role": "assistant", "content": self.answer.to_json()},
        ]
        return json.dumps({"messages": messages}, ensure_ascii=False, separators=(",", ":"))


class Dice:
    """Choices drawn from `random()` alone, the one call whose sequence Python keeps for a seed across versions."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def below(self, stop: int) -> int:
        return int(self._random.random() * stop)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        items = list(options)
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
        return items


def read_wording() -> dict[str, Any]:
    return tomllib.loads((HERE / "wording.toml").read_text(encoding="utf-8"))


class Notes:
    """The notes of one split, without end."""

    def __init__(self, split: Split, *, seed: int) -> None:
        wording = read_wording()
        shared = wording["shared"]
        self._own = wording[split]
        self._dice = Dice(f"{split} {seed}")
        self._names: list[str] = shared["names"]
        self._units: list[str] = shared["units"]
        self._numbers: list[str] = shared["numbers"]
        self._species = [Species(*row) for row in shared["species"]]
        held_out = split == "held_out"
        # A quarter of all pairs is held out, along the diagonals: each species and each activity stands on both sides.
        self._pairs = [
            (species, activity)
            for i, species in enumerate(self._species)
            for j, activity in enumerate((*ACTIVITIES, None))
            if ((i + j) % 4 == 0) == held_out
        ]
        if held_out:
            unseen = [Species(*row) for row in shared["species_held_out"]]
            self._pairs += [(species, activity) for species in unseen for activity in (*ACTIVITIES, None)]
        self._places = [
            f"{stem} {feature}"
            for i, stem in enumerate(shared["places_stem"])
            for j, feature in enumerate(shared["places_feature"])
            if ((i + j) % 4 == 0) == held_out
        ]

    def rows(self) -> Iterator[Row]:
        """Every frame in turn, the registers side by side, in a new order each time round."""
        while True:
            decks = [self._dice.shuffled(self._own["frames"][register]) for register in REGISTERS]
            for frames in zip(*decks, strict=True):
                for register, frame in zip(REGISTERS, frames, strict=True):
                    yield self._row(register, frame)

    def _row(self, register: str, frame: str) -> Row:
        dice = self._dice
        with_activity = "{doing}" in frame
        species, activity = dice.pick([pair for pair in self._pairs if (pair[1] is not None) == with_activity])
        place = dice.pick(self._places) if "{place}" in frame else None
        count = self._count(at_least=2 if activity == "fighting" else 1, at_most=species.largest_group)
        hour, minute = 4 + dice.below(19), dice.below(60)
        if "{when}" in frame and dice.chance(0.35):
            minute = dice.pick((0, 15, 30, 45))
        with_time = "{when}" in frame or "{clock}" in frame
        threat = dice.pick(THREATS[:-1]) if dice.chance(0.55) else "none"
        threat_sentence = dice.pick(self._own["threat"][threat]) if threat != "none" or dice.chance(0.45) else ""
        aside = self._aside(with_place=place is not None, with_time=with_time) if dice.chance(0.6) else ""
        values = {
            "animals": self._animals(species, count),
            "short": self._short(species, count),
            "is": "is" if count == 1 else "are",
            "was": "was" if count == 1 else "were",
            "doing": self._doing(species, activity),
            "place": place or "",
            "when": self._when(hour, minute),
            "clock": self._clock(hour, minute),
            "threat": threat_sentence,
            "aside": aside,
            **self._distractors(species, place),
        }
        worn = self._typo(frame) if register in ("radio", "sms") and dice.chance(0.3) else frame
        note = self._finish(fill(fill(worn, values), values), register)
        answer = Answer(
            species=species.singular,
            count=count,
            activity=activity,
            place=place,
            time=f"{hour:02}:{minute:02}" if with_time else None,
            threat=threat,
        )
        sentences = (*split_sentences(frame), *filter(None, (threat_sentence, aside)))
        return Row(note=note, answer=answer, sentences=sentences)

    def _count(self, *, at_least: int, at_most: int) -> int | None:
        """Often one, a pair or a small group; nothing in a fifth of the notes."""
        dice = self._dice
        kind = dice.below(10)
        if kind < 2:
            return None
        if kind < 4:
            return at_least
        largest = 2 if kind < 5 else 12 if kind < 8 else at_most
        return at_least + dice.below(min(largest, at_most) - at_least + 1)

    def _animals(self, species: Species, count: int | None) -> str:
        """The animals in running text: `three zebras`, `a lone rhino`."""
        dice, one, many = self._dice, species.singular, species.plural
        if dice.chance(0.08):
            one, many = self._typo(one), self._typo(many)
        if count is None:
            return f"{dice.pick(('some', 'several', 'a few', 'a number of', 'many', 'uncounted'))} {many}"
        if count == 1:
            return f"{dice.pick(('a lone', 'one', 'a single', '1', 'a young', 'one adult'))} {one}"
        forms = [f"{count} {many}", f"{count} adult {many}", f"a group of {count} {many}"]
        if count < len(self._numbers):
            forms += [f"{self._numbers[count]} {many}", f"{self._numbers[count]} big {many}"]
        if count > 3:
            young = 1 + dice.below(count // 2)
            forms.append(f"{count} {many}, {young} of them young,")
        forms += {2: [f"a pair of {many}"], 6: [f"half a dozen {many}"], 12: [f"a dozen {many}"]}.get(count, [])
        return dice.pick(forms)

    def _short(self, species: Species, count: int | None) -> str:
        """The animals in a log or a message: `zebra x3`."""
        dice = self._dice
        name = species.short if species.short and dice.chance(0.4) else species.singular
        if count is None:
            return f"{name} {dice.pick(('x?', '(no count)', '(number unclear)'))}"
        return dice.pick((f"{count} {name}", f"{name} x{count}", f"{count}x {name}", f"{name} ({count})"))

    def _doing(self, species: Species, activity: str | None) -> str:
        if activity is None:
            return ""
        key = f"feeding_{species.diet}" if activity == "feeding" else activity
        return self._dice.pick(self._own["doing"][key])

    def _clock(self, hour: int, minute: int) -> str:
        """The time as digits of a day of 24 hours."""
        return self._dice.pick(
            (f"{hour:02}:{minute:02}", f"{hour:02}{minute:02}h", f"{hour}h{minute:02}", f"{hour:02}{minute:02} hrs")
        )

    def _when(self, hour: int, minute: int) -> str:
        """The time as people say it."""
        half = "am" if hour < 12 else "pm"
        part = "in the morning" if hour < 12 else "in the afternoon" if hour < 18 else "in the evening"
        twelve = (hour - 1) % 12 + 1
        forms = [f"at {twelve}.{minute:02} {half}", f"at {twelve}:{minute:02}{half}"]
        forms += [f"at {self._clock(hour, minute)}"] * 2
        if minute == 0:
            forms = ["at noon"] if hour == 12 else [f"at {twelve} {half}", f"at {self._numbers[twelve]} {part}"]
        if minute in (15, 30):
            forms.append(f"at {'quarter' if minute == 15 else 'half'} past {self._numbers[twelve]} {part}")
        if minute == 45 and hour != 11:
            forms.append(f"at quarter to {self._numbers[twelve % 12 + 1]} {part}")
        return self._dice.pick(forms)

    def _aside(self, *, with_place: bool, with_time: bool) -> str:
        """Something else. It names a place or an hour only where the sighting has one of its own to tell it from."""
        kinds = ["plain", "plain", "plain"] + ["with_place"] * with_place + ["with_time"] * with_time
        return self._dice.pick(self._own["aside"][self._dice.pick(kinds)])

    def _distractors(self, species: Species, place: str | None) -> dict[str, str]:
        dice = self._dice
        other = dice.pick([animal for animal in self._species if animal != species])
        hour, minute = 3 + dice.below(16), dice.pick((0, 10, 20, 40, 50))
        letters = "".join(dice.pick("ABDGKLMT") for _ in range(4))
        return {
            "name": dice.pick(self._names),
            "unit": dice.pick(self._units),
            "plate": f"{letters[:3]} {100 + dice.below(900)}{letters[3]}",
            "km": str(2 + dice.below(140)),
            "metres": str(50 * (1 + dice.below(12))),
            "degrees": str(11 + dice.below(28)),
            "litres": str(2 + dice.below(38)),
            "few": str(2 + dice.below(5)),
            "other": f"{2 + dice.below(20)} {other.plural}" if dice.chance(0.6) else other.plural,
            "other_place": dice.pick([name for name in self._places if name != place]),
            "other_clock": f"{hour:02}:{minute:02}",
        }

    def _typo(self, text: str) -> str:
        """Two neighbouring inner letters of one word of five or more changed about, outside slots."""
        words = list(re.finditer(r"(?<![{\w])[A-Za-z]{5,}(?![}\w])", text))
        if not words:
            return text
        word = self._dice.pick(words)
        at = word.start() + 1 + self._dice.below(len(word[0]) - 3)
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]

    def _finish(self, text: str, register: str) -> str:
        """The spaces that empty slots left, and the capitals of the register."""
        text = re.sub(r"\s+", " ", text).strip()
        text = text.replace(",,", ",").replace(",.", ".").replace(", :", ":")
        if register == "radio" and self._dice.chance(0.2):
            return text.upper()
        if register == "sms" and self._dice.chance(0.6):
            return text.lower()
        return re.sub(r"(?:^|(?<=[.!?] ))[a-z]", lambda m: m[0].upper(), text) if register != "sms" else text


def fill(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda slot: values[slot[1]], text)


def split_sentences(frame: str) -> list[str]:
    """The sentences of a frame that hold words of their own."""
    parts = re.split(r"(?<=[.!?])\s+|(?<=\{threat\})\s+|(?<=\{aside\})\s+", frame)
    return [part for part in parts if re.search(r"[A-Za-z]{2,}", re.sub(r"\{\w+\}", "", part))]


def make_rows(split: Split, num_rows: int, *, seed: int) -> list[Row]:
    """The first rows of a split, no note twice."""
    rows: dict[str, Row] = {}
    for row in Notes(split, seed=seed).rows():
        rows.setdefault(row.note, row)
        if len(rows) == num_rows:
            return list(rows.values())
    raise AssertionError("Notes.rows never ends")


def write(path: Path, rows: Sequence[Row]) -> None:
    path.write_bytes("".join(row.to_json() + "\n" for row in rows).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the patrol notes of the quickstart.")
    parser.add_argument("--train-rows", type=int, default=600)
    parser.add_argument("--held-out-rows", type=int, default=240)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "train.jsonl", make_rows("train", options.train_rows, seed=options.seed))
    write(options.out / "held_out.jsonl", make_rows("held_out", options.held_out_rows, seed=options.seed))


if __name__ == "__main__":
    main()
