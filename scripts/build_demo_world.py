"""Make the embedded world: a fictional encyclopaedia and questions that only it can answer.

    python scripts/build_demo_world.py                  # writes data/demo/{corpus.jsonl, train, dev, test .parquet}

Everything follows from ``--seed``. Names are drawn fresh, so no answer can be known without searching. The policy
builder makes other worlds (other seeds) from the same generator: names, facts and answers differ, language doesn't.
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "data" / "demo"

ONSETS = "b br c d dr f g gr h j k kl l m n p r s st t th tr v w z".split()
VOWELS = "a e i o u ai ea or an el".split()
CODAS = "l n r s th m nd rk x v".split()
ADJECTIVES = (
    "Amber Ancient Ashen Bitter Black Blue Brave Bright Broken Burning Calm Copper Crimson Crooked Crystal Curious "
    "Dark Distant Drifting Eager Emerald Empty Endless Faded Fallen First Flying Forgotten Frozen Gentle Gilded Glass "
    "Golden Grand Green Grey Hidden Hollow Honest Humble Iron Ivory Jade Last Lonely Long Lost Lucky Marble Midnight "
    "Narrow Noble Northern Old Pale Paper Patient Purple Quiet Restless Rising Royal Sacred Scarlet Secret Seventh "
    "Silent Silver Simple Sleeping Slow Southern Stolen Stone Strange Sunken Velvet Wandering Western White Wild Winter"
).split()
NOUNS = (
    "Anchor Arrow Autumn Beacon Bell Bridge Candle Canyon Castle Circle Clock Cloud Compass Coast Crown Dancer Desert "
    "Door Dragon Echo Engine Falcon Feather Field Flame Forest Fountain Fox Garden Gate Ghost Hammer Harbor Harvest "
    "Heart Horizon House Island Journey Key Kingdom Lake Lantern Letter Lighthouse Lion Machine Mask Meadow Mirror "
    "Moon Mountain Ocean Orchard Owl Palace Path Pearl Planet Prince Promise Queen Rain River Road Rose Sailor Shadow "
    "Shore Signal Sky Song Sparrow Spring Star Station Storm Summer Sword Temple Thunder Tower Train Valley Voyage "
    "Wall Wave Whisper Window Wolf Year"
).split()
FIRMS = "Works Motors Systems Foods Mills Press Airlines Chemicals".split()
GENRES = "drama comedy crime horror war adventure".split()
JOBS = {"film": "film director", "book": "writer", "band": "singer", "company": "engineer"}

# Share of each page kind; a world of n pages has about share x n of them.
SHARES = {"film": 0.16, "book": 0.16, "band": 0.1, "company": 0.1, "city": 0.07}
MIX = {"one_hop": 0.22, "two_hop": 0.32, "three_hop": 0.22, "comparison": 0.14, "yes_no": 0.10}


@dataclass
class Entity:
    """One page. ``facts`` map a relation to its value: another Entity, or text (a year)."""

    kind: str
    name: str
    facts: dict
    text: str = ""

    @property
    def url(self) -> str:
        return f"https://{self.kind}.demo.example/{self.name.replace(' ', '_')}"


# relation -> (how a page and a thought say it, how a question names it, what a query adds)
RELATIONS = {
    "director": (" was directed by", "the director of", "director"),
    "author": (" was written by", "the author of", "author"),
    "publisher": (" was published by", "the publisher of", "publisher"),
    "singer": (" is led by", "the leader of", "leader"),
    "founder": (" was founded by", "the founder of", "founder"),
    "formed": (" was formed in", "the home town of", "formed"),
    "seat": (" is based in", "the home city of", "based"),
    "birthplace": (" was born in", "the birthplace of", "born"),
    "country": (" is a city in", "the country of", "country"),
    "year": (" came out in", "the year of", "year"),
    "born": (": the birth year is", "the birth year of", "birth year"),
}
# kind of page -> the relations that lead on from it
LINKS = {
    "film": ("director",),
    "book": ("author", "publisher"),
    "band": ("singer", "formed"),
    "company": ("founder", "seat"),
    "person": ("birthplace",),
    "city": ("country",),
}
# how a one-hop question is asked
ASK = {
    "director": ["Who directed {}?", "Who was the director of {}?"],
    "author": ["Who wrote {}?", "Who is the author of {}?"],
    "publisher": ["Which company published {}?"],
    "singer": ["Who leads the band {}?", "Who is the singer of {}?"],
    "founder": ["Who founded {}?", "Who is the founder of {}?"],
    "formed": ["In which city was {} formed?"],
    "seat": ["In which city is {} based?"],
    "birthplace": ["Where was {} born?", "In which city was {} born?"],
    "country": ["In which country is {}?"],
}


class Namer:
    """Draws names without repeats. Words of a name come from small pools, so that pages share them."""

    def __init__(self, rng: random.Random, pages: int) -> None:
        self._rng, self._used = rng, set()
        self._first = [self._word() for _ in range(max(12, pages // 16))]
        self._last = [self._word() for _ in range(max(16, pages // 10))]
        size = min(1.0, max(0.3, (pages / 3000) ** 0.5))
        self._adjectives = rng.sample(ADJECTIVES, int(len(ADJECTIVES) * size))
        self._nouns = rng.sample(NOUNS, int(len(NOUNS) * size))

    def _word(self) -> str:
        rng = self._rng
        word = rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(ONSETS) + rng.choice(VOWELS)
        return (word + (rng.choice(CODAS) if rng.random() < 0.6 else "")).capitalize()

    def _unique(self, draw) -> str:
        while (name := draw()) in self._used:
            pass
        self._used.add(name)
        return name

    def person(self) -> str:
        return self._unique(lambda: f"{self._rng.choice(self._first)} {self._rng.choice(self._last)}")

    def place(self) -> str:
        return self._unique(self._word)

    def title(self) -> str:
        return self._unique(lambda: f"The {self._rng.choice(self._adjectives)} {self._rng.choice(self._nouns)}")

    def band(self) -> str:
        return self._unique(lambda: f"{self._rng.choice(self._adjectives)} {self._rng.choice(self._nouns)} Band")

    def company(self) -> str:
        return self._unique(lambda: f"{self._word()} {self._rng.choice(FIRMS)}")


class World:
    """An encyclopaedia of about ``pages`` entities, and questions over it. The same seed gives the same world."""

    def __init__(self, seed: int, pages: int = 3200) -> None:
        self.rng = random.Random(seed)
        self.namer = Namer(self.rng, pages)
        self.by_kind: dict[str, list[Entity]] = {}
        self._populate(pages)
        self._write()

    @property
    def pages(self) -> list[dict[str, str]]:
        return [{"title": e.name, "url": e.url, "text": e.text} for entities in self.by_kind.values() for e in entities]

    def _populate(self, pages: int) -> None:
        rng, namer = self.rng, self.namer
        count = {kind: max(4, round(pages * share)) for kind, share in SHARES.items()}
        countries = [Entity("country", namer.place(), {"language": namer.place()}) for _ in range(max(6, pages // 120))]
        cities = [Entity("city", namer.place(), {"country": rng.choice(countries)}) for _ in range(count["city"])]

        def person(work: str) -> Entity:
            facts = {"birthplace": rng.choice(cities), "born": str(rng.randint(1900, 1989)), "job": JOBS[work]}
            people.append(Entity("person", namer.person(), facts))
            return people[-1]

        people: list[Entity] = []
        makers = {work: [person(work) for _ in range(max(3, int(count[work] * 0.6)))] for work in JOBS}
        year = lambda: str(rng.randint(1900, 1999))  # noqa: E731
        companies = [
            Entity("company", namer.company(), {"founder": rng.choice(makers["company"]), "seat": rng.choice(cities)})
            for _ in range(count["company"])
        ]
        films = [
            Entity("film", namer.title(), {"director": rng.choice(makers["film"]), "year": year()})
            for _ in range(count["film"])
        ]
        books = [
            Entity(
                "book",
                namer.title(),
                {"author": rng.choice(makers["book"]), "publisher": rng.choice(companies), "year": year()},
            )
            for _ in range(count["book"])
        ]
        bands = [
            Entity("band", namer.band(), {"singer": rng.choice(makers["band"]), "formed": rng.choice(cities)})
            for _ in range(count["band"])
        ]
        while len(people) < pages - sum(map(len, (countries, cities, companies, films, books, bands))):
            person(rng.choice(list(JOBS)))
        self.by_kind = {
            "film": films, "book": books, "band": bands, "company": companies,
            "person": people, "city": cities, "country": countries,
        }  # fmt: skip

    def _write(self) -> None:
        """Give every entity its page: a few sentences, in one of several orders, with other names beside the facts."""
        rng, people = self.rng, self.by_kind["person"]
        for entities in self.by_kind.values():
            for e in entities:
                f, name = e.facts, e.name
                value = {k: v.name if isinstance(v, Entity) else v for k, v in f.items()}
                if e.kind == "film":
                    rest = [f"It came out in {value['year']}.", f"Its star is {rng.choice(people).name}."]
                    first = f"{name} is {_article(rng.choice(GENRES))} film. It was directed by {value['director']}."
                elif e.kind == "book":
                    rest = [f"It was published by {value['publisher']}.", f"It came out in {value['year']}."]
                    first = f"{name} is a novel. It was written by {value['author']}."
                elif e.kind == "band":
                    rest = [f"It was formed in {value['formed']}.", f"Its drummer is {rng.choice(people).name}."]
                    first = f"{name} is a rock band. It is led by {value['singer']}."
                elif e.kind == "company":
                    rest = [f"It is based in {value['seat']}.", f"Its manager is {rng.choice(people).name}."]
                    first = f"{name} is a company. It was founded by {value['founder']}."
                elif e.kind == "person":
                    rest = [f"The birth year is {value['born']}."]
                    first = f"{name} is {_article(value['job'])}, and was born in {value['birthplace']}."
                elif e.kind == "city":
                    rest = [f"Its mayor is {rng.choice(people).name}."]
                    first = f"{name} is a city in {value['country']}."
                else:
                    rest = [f"Its capital is {rng.choice(self.by_kind['city']).name}."]
                    first = f"{name} is a country. Its people speak {value['language']}."
                rng.shuffle(rest)
                e.text = " ".join([first, *rest])

    # -- questions ---------------------------------------------------------------------------------------------------

    def question(self, rng: random.Random, kind: str | None = None) -> dict:
        """One question: {question, golds, kind, steps}. A step is (subject, relation, value): what a search finds."""
        kind = kind or rng.choices(list(MIX), list(MIX.values()))[0]
        if kind in ("comparison", "yes_no"):
            return self._pair(rng, kind)
        hops = {"one_hop": 1, "two_hop": 2, "three_hop": 3}[kind]
        starts = (
            ["film", "book", "band", "company"] + (["person"] if hops < 3 else []) + (["city"] if hops == 1 else [])
        )
        while True:
            steps = self._walk(rng, rng.choice(self.by_kind[rng.choice(starts)]), hops)
            if steps:
                break
        subject, (*inner, last) = steps[0][0], [relation for _, relation, _ in steps]
        phrase = subject.name
        for relation in inner:
            phrase = f"{RELATIONS[relation][1]} {phrase}"
        answer = steps[-1][2]
        return {
            "question": rng.choice(ASK[last]).format(phrase),
            "golds": self._aliases(answer),
            "kind": kind,
            "steps": steps,
        }

    def _walk(self, rng: random.Random, entity: Entity, hops: int) -> list | None:
        """``hops`` steps along the links from ``entity``; None where they end too early."""
        steps = []
        for hop in range(hops):
            relations = list(LINKS.get(entity.kind, ()))
            if hop and hops == 2 and "publisher" in relations:
                relations.remove("publisher")
            if not relations:
                return None
            relation = rng.choice(relations)
            steps.append((entity, relation, entity.facts[relation]))
            entity = entity.facts[relation]
        return steps

    def _pair(self, rng: random.Random, kind: str) -> dict:
        if kind == "comparison":
            page_kind, relation, text = rng.choice(
                [
                    ("person", "born", "Who was born earlier, {} or {}?"),
                    ("film", "year", "Which film came out earlier, {} or {}?"),
                    ("book", "year", "Which book came out earlier, {} or {}?"),
                ]
            )
            while True:
                a, b = rng.sample(self.by_kind[page_kind], 2)
                if a.facts[relation] != b.facts[relation]:
                    break
            golds = [min(a, b, key=lambda e: e.facts[relation]).name]
        else:
            page_kind, relation, text = rng.choice(
                [
                    ("person", "birthplace", "Were {} and {} born in the same city?"),
                    ("film", "director", "Were {} and {} directed by the same person?"),
                    ("book", "author", "Were {} and {} written by the same person?"),
                ]
            )
            same = rng.random() < 0.5
            while True:
                a = rng.choice(self.by_kind[page_kind])
                pool = [
                    e
                    for e in self.by_kind[page_kind]
                    if e is not a and (e.facts[relation] is a.facts[relation]) == same
                ]
                if pool:
                    b = rng.choice(pool)
                    break
            golds = ["yes" if same else "no"]
        steps = [(e, relation, e.facts[relation]) for e in (a, b)]
        return {"question": text.format(a.name, b.name), "golds": golds, "kind": kind, "steps": steps}

    @staticmethod
    def _aliases(value: Entity) -> list[str]:
        """The gold and the other forms that count: a firm without its suffix, a person with an initial."""
        first, _, last = value.name.partition(" ")
        short = {"company": [first], "person": [f"{first[0]}. {last}"]}
        return [value.name, *short.get(value.kind, [])]


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def to_row(item: dict, index: int, split: str) -> dict:
    """A question as a DeepResearcher row."""
    return {
        "data_source": f"demo_{item['kind']}",
        "prompt": [{"role": "user", "content": item["question"]}],
        "ability": "qa",
        "reward_model": {"ground_truth": "<|answer_split|>".join(item["golds"]), "style": "rule"},
        "extra_info": {"index": index, "split": split},
    }


def draw_questions(world: World, rng: random.Random, sizes: dict[str, int]) -> dict[str, list[dict]]:
    """Distinct questions for each split; the mix of kinds is the same in all."""
    seen: set[str] = set()
    splits = {}
    for split, size in sizes.items():
        kinds = [kind for kind, share in MIX.items() for _ in range(round(share * size))]
        rows = []
        for kind in kinds[:size]:
            item = world.question(rng, kind)
            while item["question"] in seen:
                item = world.question(rng, kind)
            seen.add(item["question"])
            rows.append(item)
        rng.shuffle(rows)
        splits[split] = [to_row(item, index, split) for index, item in enumerate(rows)]
    return splits


def main() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=2025)
    parser.add_argument("--pages", type=int, default=3200)
    parser.add_argument("--out", type=Path, default=DEMO)
    args = parser.parse_args()

    world = World(args.seed, args.pages)
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "corpus.jsonl", "w", encoding="utf-8") as file:
        for page in world.pages:
            file.write(json.dumps(page, ensure_ascii=False) + "\n")
    splits = draw_questions(world, random.Random(args.seed + 1), {"train": 2000, "dev": 200, "test": 300})
    for split, rows in splits.items():
        pq.write_table(pa.Table.from_pylist(rows), args.out / f"{split}.parquet")
    print(f"{args.out}: {len(world.pages)} pages; " + ", ".join(f"{len(r)} {s}" for s, r in splits.items()))


if __name__ == "__main__":
    main()
